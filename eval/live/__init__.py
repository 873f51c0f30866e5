"""The evaluation of a live endpoint: it needs a client for HTTP, and neither torch nor a checkpoint."""
