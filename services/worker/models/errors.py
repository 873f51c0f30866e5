"""Faults of a checkpoint directory."""

from services.worker.errors import WorkerError

__all__ = ["CheckpointError"]


class CheckpointError(WorkerError):
    """The checkpoint cannot be served; one line that names the file, the tensor or field, and the remedy."""
