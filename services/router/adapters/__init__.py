"""How the router speaks to the outside: HTTP, gRPC, tokenizer and template libraries."""
