"""Where segment states lie besides the engine's memory: blobs in host memory, on disk, in Redis, behind one port."""
