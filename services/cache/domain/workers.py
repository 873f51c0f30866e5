"""Workers as the directory knows them."""

from dataclasses import dataclass

__all__ = ["WorkerRecord"]


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker, where others reach it, and what it says of itself with its last heartbeat: bytes that mean nothing here."""

    worker_id: str
    address: str
    description: bytes = b""
