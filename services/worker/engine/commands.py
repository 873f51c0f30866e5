"""What changes an engine from outside: every rank of a group runs the same commands between the same steps."""

from dataclasses import dataclass

from services.worker.engine.loop import Engine
from services.worker.engine.requests import CaptureJob, GenerateRequest

__all__ = ["Cancel", "Command", "Drop", "Rename", "Submit", "SubmitCapture"]


@dataclass(frozen=True, slots=True)
class Submit:
    """See `Engine.submit`."""

    request: GenerateRequest

    def __call__(self, engine: Engine) -> None:
        """Obey."""
        engine.submit(self.request)


@dataclass(frozen=True, slots=True)
class SubmitCapture:
    """See `Engine.submit_capture`."""

    job: CaptureJob

    def __call__(self, engine: Engine) -> None:
        """Obey."""
        engine.submit_capture(self.job)


@dataclass(frozen=True, slots=True)
class Cancel:
    """See `Engine.cancel`."""

    request_id: str

    def __call__(self, engine: Engine) -> None:
        """Obey."""
        engine.cancel(self.request_id)


@dataclass(frozen=True, slots=True)
class Drop:
    """Make stored states unreachable."""

    keys: tuple[bytes, ...]

    def __call__(self, engine: Engine) -> int:
        """Obey; returns how many were there."""
        return sum(engine.context.store.drop(key) for key in self.keys)


@dataclass(frozen=True, slots=True)
class Rename:
    """Put a stored state under another key."""

    key: bytes
    new_key: bytes

    def __call__(self, engine: Engine) -> int:
        """Obey; returns its size, 0 where it is not there or the new key is taken."""
        store = engine.context.store
        return 0 if self.new_key in store else store.rename(self.key, self.new_key)


Command = Submit | SubmitCapture | Cancel | Drop | Rename
