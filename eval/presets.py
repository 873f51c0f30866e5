"""Named lists of settings."""

from enum import StrEnum

from eval.settings import Mode, Prime, Refresh, Selection, Setting
from services.worker.engine.seam import SeamWindow

__all__ = [
    "DEFAULT_SETTING",
    "FIXED_WINDOWS",
    "GROWING_WINDOWS",
    "PUBLISHED",
    "PUBLISHED_FRONT",
    "PUBLISHED_UNPRIMED",
    "REFRESH_FRONT",
    "Preset",
    "settings_of",
]

# As its authors run it: the system part ahead of every segment at capture, eight tokens recomputed.
PUBLISHED = Setting(Mode.COMPOSE, Prime.SYSTEM, SeamWindow(8))
PUBLISHED_UNPRIMED = Setting(Mode.COMPOSE, Prime.NONE, SeamWindow(8))
# What the demo model's profile says.
DEFAULT_SETTING = Setting(Mode.COMPOSE, Prime.START, SeamWindow(32, 0.125, 128))
# The windows that the default is chosen from: fixed ones, and shares that a window grows to.
FIXED_WINDOWS = tuple(Setting(Mode.COMPOSE, Prime.START, SeamWindow(tokens)) for tokens in (8, 32, 64))
GROWING_WINDOWS = tuple(Setting(Mode.COMPOSE, Prime.START, SeamWindow(32, share, 128)) for share in (0.125, 0.15, 0.2))
_SEAM_WINDOWS = tuple(SeamWindow(tokens) for tokens in (0, 8, 16, 32, 64))
_MAIN_PRIMES = (Prime.NONE, Prime.START, Prime.SYSTEM)
_LIVE_SHARES = (0.12, 0.15, 0.2, 0.25, 0.3, 0.4)


class Preset(StrEnum):
    """ci: what a test holds; budget: loss against live tokens, of this method and of the published one; confirm: what the
    choice of the default rests on; refresh: blocks recomputed in place at the default's prime; core: what every question of
    a long run is asked under; short: what two cores run in minutes; full: everything.
    """

    BUDGET = "budget"
    CI = "ci"
    CONFIRM = "confirm"
    REFRESH = "refresh"
    CORE = "core"
    SHORT = "short"
    FULL = "full"


def settings_of(preset: Preset) -> tuple[Setting, ...]:
    """The settings of a preset; full recompute always runs beside them."""
    match preset:
        case Preset.BUDGET:
            return (DEFAULT_SETTING, *PUBLISHED_FRONT, *REFRESH_FRONT)
        case Preset.CI:
            return (Setting(Mode.TRANSITION_ROPE, Prime.START), DEFAULT_SETTING)
        case Preset.CONFIRM:
            return (PUBLISHED_UNPRIMED, PUBLISHED, *FIXED_WINDOWS, *GROWING_WINDOWS)
        case Preset.REFRESH:
            both = [_refreshed(Refresh(Selection.BOTH, share), Prime.START) for share in (0.15, 0.3)]
            changes = _refreshed(Refresh(Selection.PRIME_CHANGE, 0.15), Prime.START)
            served = [_refreshed(Refresh(Selection.SERVED, share), Prime.START) for share in (0.15, 0.3)]
            return (PUBLISHED, DEFAULT_SETTING, *served, changes, *both)
        case Preset.SHORT:
            refreshed = _refreshed(Refresh(Selection.BOTH, 0.3), Prime.START)
            return (*_ablations(Prime.START), PUBLISHED_UNPRIMED, DEFAULT_SETTING, refreshed)
        case Preset.CORE:
            return _core()
        case Preset.FULL:
            return _full()


def _core() -> tuple[Setting, ...]:
    return (
        *_ablations(Prime.NONE)[:3],
        *_ablations(Prime.SYSTEM)[:3],
        PUBLISHED_UNPRIMED,
        PUBLISHED,
        DEFAULT_SETTING,
        *(Setting(Mode.COMPOSE, Prime.SYSTEM, SeamWindow(tokens)) for tokens in (16, 32)),
        *(_refreshed(Refresh(selection, share)) for selection in _GOOD for share in (0.15, 0.3)),
        *(_refreshed(Refresh(selection, share), seam=0) for selection in _GOOD[1:] for share in (0.15, 0.3)),
    )


def _full() -> tuple[Setting, ...]:
    other_primes = [(prime, tokens) for prime in (Prime.NEUTRAL, Prime.DOCUMENT) for tokens in (0, 8, 32)]
    return (
        Setting(Mode.EXACT),
        *(own for prime in (Prime.NONE, Prime.SYSTEM) for own in _ablations(prime)),
        *(Setting(Mode.COMPOSE, prime, window) for prime in _MAIN_PRIMES for window in _SEAM_WINDOWS),
        *GROWING_WINDOWS,
        *(Setting(Mode.COMPOSE, prime, SeamWindow(tokens)) for prime, tokens in other_primes),
        *(Setting(Mode.COMPOSE, Prime.SYSTEM, SeamWindow(head), tail) for head, tail in ((0, 8), (8, 8), (16, 16))),
        *_refreshes(),
    )


_GOOD = (Selection.FIRST_LAYER, Selection.PRIME_CHANGE, Selection.BOTH)


def _ablations(prime: Prime) -> tuple[Setting, ...]:
    """Whole segments as stored. Under a prime that the model needs, what is lost is lost by the composition itself."""
    modes = (Mode.ADDITION, Mode.TRANSITION, Mode.TRANSITION_ROPE, Mode.LAST_STATE, Mode.TAIL_REPLAY)
    return tuple(Setting(mode, prime) for mode in modes)


def _refreshed(refresh: Refresh, prime: Prime = Prime.SYSTEM, seam: int = 8) -> Setting:
    return Setting(Mode.COMPOSE, prime, SeamWindow(seam), refresh=refresh)


# Loss against live tokens: the published method widens its window, this one refreshes blocks at the default's prime.
PUBLISHED_FRONT = tuple(Setting(Mode.COMPOSE, Prime.SYSTEM, SeamWindow(tokens)) for tokens in (0, 8, 16, 32))
REFRESH_FRONT = (
    Setting(Mode.COMPOSE, Prime.START, SeamWindow(0)),
    Setting(Mode.COMPOSE, Prime.START, SeamWindow(8)),
    *(_refreshed(Refresh(Selection.SERVED, share), Prime.START) for share in (0.12, 0.2, 0.27, 0.4)),
)


def _refreshes() -> tuple[Setting, ...]:
    first = Selection.FIRST_LAYER
    return (
        *(_refreshed(Refresh(first, share)) for share in _LIVE_SHARES),
        *(_refreshed(Refresh(selection, 0.25)) for selection in Selection if selection is not first),
        *(_refreshed(Refresh(selection, 0.5)) for selection in (Selection.SEGMENTS, *_GOOD)),
        *(_refreshed(Refresh(selection, 0.15)) for selection in _GOOD[1:]),
        *(_refreshed(Refresh(first, 0.25, block_tokens)) for block_tokens in (8, 32)),
        *(_refreshed(Refresh(first, 0.25, 16, replay)) for replay in (0, 32)),
        *(_refreshed(Refresh(first, 0.25), prime) for prime in (Prime.NONE, Prime.START)),
        *(_refreshed(Refresh(selection, share), seam=0) for selection in _GOOD[1:] for share in (0.08, 0.2)),
        *(_refreshed(Refresh(selection, 0.3), seam=16) for selection in _GOOD[1:]),
    )
