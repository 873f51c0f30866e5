"""The kernels on one GPU: whether they are right, then how fast, at the shapes of Qwen3.5-35B-A3B."""
