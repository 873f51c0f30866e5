"""What speaks to the outside: directories, messages, metrics."""
