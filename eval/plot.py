"""The front of score against live tokens, as a picture."""

import re
from collections.abc import Sequence
from pathlib import Path

from eval.statistics import Summary

__all__ = ["draw_front"]

_SEAM = re.compile(r"^compose w(?P<seam>\d+) prime (?P<prime>\w+)$")
_REFRESH = re.compile(r"^compose w8 prime system refresh (?P<selection>\w+) \d+% b16 r8$")


def draw_front(summaries: Sequence[Summary], path: Path) -> None:
    """Left: exact match against seam width, a line a prime. Right: points lost against the share of live tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    for prime, points in _lines(summaries, _SEAM, "prime").items():
        widths = [int(own.setting.split("w")[1].split()[0]) for own in points]
        left.plot(widths, [100 * own.exact for own in points], marker="o", label=f"prime {prime}")
        right.plot(
            [100 * own.live_share for own in points], [own.loss.value for own in points], marker="o", label=prime
        )
    left.axhline(100 * summaries[0].reference, color="black", linestyle=":", label="full recompute")
    left.set(xlabel="seam width, tokens", ylabel="exact match, %", title="Score against seam width")
    for selection, points in _lines(summaries, _REFRESH, "selection").items():
        shares = [100 * own.live_share for own in points]
        losses = [own.loss.value for own in points]
        right.plot(shares, losses, marker="s", linestyle="--", label=f"refresh, {selection}")
    right.set(xlabel="live document tokens, %", ylabel="points lost", title="Loss against live share")
    right.set_yscale("symlog", linthresh=1)
    left.legend(fontsize=8)
    right.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _lines(summaries: Sequence[Summary], pattern: re.Pattern[str], key: str) -> dict[str, list[Summary]]:
    """Summaries whose setting matches, by the pattern's group, in order of live share."""
    lines: dict[str, list[Summary]] = {}
    for own in summaries:
        match = pattern.match(own.setting)
        if match:
            lines.setdefault(match[key], []).append(own)
    return {name: sorted(points, key=lambda own: own.live_share) for name, points in lines.items()}
