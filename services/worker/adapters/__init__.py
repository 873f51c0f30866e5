"""What connects the engine to files, threads, gRPC and the cache service."""
