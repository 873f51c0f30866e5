"""The profile: everything that changes the bytes of a segment state. A file, `profile.toml`; its digest enters every key."""

import json
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from blake3 import blake3

from services.blob.encodings import EXACT, Precision, StateEncoding
from services.blob.layout import LAYOUT_VERSION
from services.worker.engine.seam import MAX_SEAM_WINDOW, SeamWindow
from services.worker.errors import WorkerError

__all__ = ["Profile", "ProfileError", "load_profile"]


class ProfileError(WorkerError):
    """The profile cannot be used; the message names the field and the remedy."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What a profile file says.

    prime is text run ahead of a segment at capture; document_open and document_close wrap a document's title and text, and
    belong to the segment. Prime and wrapper may name special tokens. The seam window has at least `seam_window` tokens,
    grows with the segment to `seam_share` of it, and has at most `seam_window_max`. The last six fields say how transitions,
    end states and convolution tails are stored, see `StateEncoding`.

    Raises:
        ProfileError: a field is out of range.
    """

    seam_window: int = 8
    seam_share: float = 0.0
    seam_window_max: int = MAX_SEAM_WINDOW
    prime: str = ""
    document_open: str = "\n<document>\n"
    document_close: str = "\n</document>\n"
    end_state: str = EXACT.end_state.value
    transition: str = EXACT.transition.value
    slow_transition: str = EXACT.slow_transition.value
    slow_decay: float = EXACT.slow_decay
    negligible_decay: float = EXACT.negligible_decay
    conv_tail: str = EXACT.conv_tail.value

    def __post_init__(self) -> None:
        if not 0 <= self.seam_window <= MAX_SEAM_WINDOW:
            raise ProfileError(f"seam_window must lie between 0 and {MAX_SEAM_WINDOW}, not {self.seam_window}")
        if not 0.0 <= self.seam_share <= 1.0:
            raise ProfileError(f"seam_share must lie between 0.0 and 1.0, not {self.seam_share}")
        if not self.seam_window <= self.seam_window_max <= MAX_SEAM_WINDOW:
            raise ProfileError(
                f"seam_window_max must lie between seam_window, {self.seam_window}, and {MAX_SEAM_WINDOW},"
                f" not {self.seam_window_max}"
            )
        for name in ("end_state", "transition", "slow_transition", "conv_tail"):
            if getattr(self, name) not in list(Precision):
                raise ProfileError(f"{name} must be one of {', '.join(Precision)}, not {getattr(self, name)!r}")
        try:
            _ = self.encoding
        except ValueError as error:
            raise ProfileError(str(error)) from error

    @property
    def seam(self) -> SeamWindow:
        """The rule that the three fields make."""
        return SeamWindow(self.seam_window, self.seam_share, self.seam_window_max)

    @property
    def encoding(self) -> StateEncoding:
        """How transitions, end states and tails are stored."""
        return StateEncoding(
            Precision(self.end_state),
            Precision(self.transition),
            Precision(self.slow_transition),
            self.slow_decay,
            self.negligible_decay,
            Precision(self.conv_tail),
        )

    def digest(self, model_revision: str, dtype: str) -> str:
        """Hexadecimal BLAKE3 over the profile, the model and the layout."""
        content = {**asdict(self), "model": model_revision, "dtype": dtype, "layout": LAYOUT_VERSION}
        return blake3(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        ProfileError: the file is missing or malformed, or has an unknown or mistyped field.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path}: {error}") from error
    kinds = {field.name: type(getattr(Profile(), field.name)) for field in fields(Profile)}
    for name, value in content.items():
        if name not in kinds:
            raise ProfileError(f"{path}: unknown field {name}; known are {', '.join(kinds)}")
        if type(value) is not kinds[name]:
            raise ProfileError(f"{path}: {name} must be of type {kinds[name].__name__}")
    try:
        return Profile(**content)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error
