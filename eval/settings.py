"""What is compared: reuse modes with their seam windows, primes and refreshes."""

from dataclasses import dataclass
from enum import StrEnum

from services.blob.encodings import EXACT, Precision, StateEncoding
from services.worker.engine.seam import SeamWindow

__all__ = ["Mode", "Prime", "Refresh", "Selection", "Setting", "encoding_name"]

_NO_WINDOW = SeamWindow(0)


class Mode(StrEnum):
    """How the documents of a prompt are served; the ablations stand in the order of design §6."""

    OFF = "off"
    EXACT = "exact"
    ADDITION = "addition"
    TRANSITION = "transition"
    TRANSITION_ROPE = "transition_rope"
    LAST_STATE = "last_state"
    TAIL_REPLAY = "tail_replay"
    COMPOSE = "compose"

    @property
    def recomputes(self) -> bool:
        """Every document token is live."""
        return self in (Mode.OFF, Mode.EXACT)


class Prime(StrEnum):
    """What runs ahead of a segment at capture.

    none: nothing; start: the template's opening of a user message; neutral: a fixed system prompt of no content and that
    opening; document: the opening and a fixed document of no content; system: the prompt's own system part; profile: what
    the served profile names.
    """

    NONE = "none"
    START = "start"
    NEUTRAL = "neutral"
    DOCUMENT = "document"
    SYSTEM = "system"
    PROFILE = "profile"


class Selection(StrEnum):
    """Which body tokens a refresh makes live.

    served: as the engine chooses, blocks by the question's attention in all full-attention layers where the state ahead of
    the body still reaches (`reach.py`); first_layer and all_layers: by that attention in the first or in all of these layers;
    random: by chance; oracle: blocks that hold the evidence, then by attention; prime_change: blocks whose keys and values
    differ most between the primes start and document, a choice made at capture; both: by turns the next best of
    first_layer and of prime_change; segments: whole documents by attention.
    """

    SERVED = "served"
    FIRST_LAYER = "first_layer"
    ALL_LAYERS = "all_layers"
    RANDOM = "random"
    ORACLE = "oracle"
    PRIME_CHANGE = "prime_change"
    BOTH = "both"
    SEGMENTS = "segments"


@dataclass(frozen=True, slots=True)
class Refresh:
    """Blocks of `block_tokens` become live until `live_share` of the document tokens is; `replay_tokens` run before each.

    most_blocks: no more than so many, as a request's `refresh` counts them; None: as the share allows.
    """

    selection: Selection
    live_share: float
    block_tokens: int = 16
    replay_tokens: int = 8
    most_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the comparison. seam_window and tail_tokens are live at every segment's head and tail.

    replay_share: with `tail_replay`, the share of the tokens before the question that run through; encoding: how the
    segments' transitions and end states are stored.

    Raises:
        ValueError: a refresh under a growing window, whose blocks would not begin where pages do.
    """

    mode: Mode
    prime: Prime = Prime.NONE
    seam_window: SeamWindow = _NO_WINDOW
    tail_tokens: int = 0
    refresh: Refresh | None = None
    replay_share: float = 0.08
    encoding: StateEncoding = EXACT

    def __post_init__(self) -> None:
        if self.refresh is not None and self.seam_window.share:
            raise ValueError("refresh: blocks begin where pages do; give it a seam_window with share 0")

    @property
    def name(self) -> str:
        """Short and unique, for tables and files."""
        if self.mode.recomputes:
            return str(self.mode)
        if self.mode is not Mode.COMPOSE:
            return str(self.mode) if self.prime is Prime.NONE else f"{self.mode} prime {self.prime}"
        name = f"compose {_window_name(self.seam_window)}"
        if self.tail_tokens:
            name += f"+{self.tail_tokens}"
        name += f" prime {self.prime}"
        if self.encoding != EXACT:
            name += f" {encoding_name(self.encoding)}"
        refresh = self.refresh
        if refresh is not None:
            much = f"{refresh.live_share:.0%}" if refresh.most_blocks is None else f"k{refresh.most_blocks}"
            name += f" refresh {refresh.selection} {much} b{refresh.block_tokens} r{refresh.replay_tokens}"
        return name


def _window_name(window: SeamWindow) -> str:
    return f"w{window.least}..{window.most} {100 * window.share:g}%" if window.share else f"w{window.least}"


def encoding_name(encoding: StateEncoding) -> str:
    """Short and unique: end states, transitions, those of slow heads and which these are, tails, and whose are left out."""
    name = f"S {encoding.end_state}, T {encoding.transition}"
    if encoding.slow_transition is not encoding.transition:
        name += f", from γ {encoding.slow_decay:g} {encoding.slow_transition}"
    if encoding.conv_tail is not Precision.FLOAT32:
        name += f", tails {encoding.conv_tail}"
    return f"{name}, none below γ {encoding.negligible_decay:g}" if encoding.negligible_decay else name
