"""What the router decides, as plain data and pure functions: no gRPC, HTTP or tokenizer library."""
