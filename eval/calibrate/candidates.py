"""Which settings a calibration compares, and the profile that serves each."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from eval.encodings import ENCODINGS
from eval.settings import Mode, Prime, Refresh, Selection, Setting
from services.worker.engine.refresh import BLOCKS
from services.worker.engine.seam import SeamWindow
from services.worker.profile import Profile

__all__ = ["PrimeText", "encoded", "grid", "profile_of", "refresh_blocks", "served_setting", "without_refresh"]

WINDOWS = (SeamWindow(8), SeamWindow(16), SeamWindow(32), SeamWindow(64), SeamWindow(32, 0.125, 128))
# Blocks a prompt, as HYPIC_ROUTER_REFRESH counts them, and the window in front of them.
REFRESHES = (4, 16)
REFRESH_WINDOW = SeamWindow(8)


@dataclass(frozen=True, slots=True)
class PrimeText:
    """What runs ahead of a segment at capture, as a profile names it and as ids."""

    text: str
    token_ids: tuple[int, ...]


def served_setting(profile: Profile, primes: Mapping[Prime, PrimeText]) -> Setting:
    """What a profile serves now."""
    prime = next(kind for kind, own in primes.items() if own.text == profile.prime)
    return Setting(Mode.COMPOSE, prime, profile.seam, encoding=profile.encoding)


def grid(served: Setting, primes: Mapping[Prime, PrimeText], *, refreshes: bool) -> tuple[Setting, ...]:
    """What is served now, then every prime with every window, and with refreshed blocks, all in full precision."""
    wanted = [served]
    for prime in primes:
        wanted += [Setting(Mode.COMPOSE, prime, window) for window in WINDOWS]
        if refreshes:
            plain = Setting(Mode.COMPOSE, prime, REFRESH_WINDOW)
            wanted += [replace(plain, refresh=_refresh(count)) for count in REFRESHES]
    return tuple(dict.fromkeys(wanted))


def encoded(setting: Setting) -> tuple[Setting, ...]:
    """A setting under every encoding of what is stored."""
    return tuple(dict.fromkeys(replace(setting, encoding=each) for each in (setting.encoding, *ENCODINGS)))


def without_refresh(setting: Setting) -> Setting:
    """The pass that looks for blocks before it refreshes any."""
    return replace(setting, refresh=None)


def refresh_blocks(setting: Setting) -> int:
    """As HYPIC_ROUTER_REFRESH counts them."""
    return 0 if setting.refresh is None else setting.refresh.most_blocks or 0


def profile_of(setting: Setting, served: Profile, primes: Mapping[Prime, PrimeText]) -> Profile:
    """The profile that serves a setting, but for its refresh, which is the router's; documents are wrapped as before."""
    encoding = setting.encoding
    return replace(
        served,
        seam_window=setting.seam_window.least,
        seam_share=setting.seam_window.share,
        seam_window_max=setting.seam_window.most,
        prime=primes[setting.prime].text,
        end_state=encoding.end_state.value,
        transition=encoding.transition.value,
        slow_transition=encoding.slow_transition.value,
        slow_decay=encoding.slow_decay,
        negligible_decay=encoding.negligible_decay,
        conv_tail=encoding.conv_tail.value,
    )


def _refresh(count: int) -> Refresh:
    """The blocks that a served request refreshes: those attended to most in the first attention layer."""
    return Refresh(Selection.FIRST_LAYER, 1.0, BLOCKS.block_tokens, BLOCKS.replay_tokens, count)
