"""Faults of a checkpoint directory."""

__all__ = ["CheckpointError"]


class CheckpointError(Exception):
    """The checkpoint cannot be served; one line that names the file, the tensor or field, and the remedy."""
