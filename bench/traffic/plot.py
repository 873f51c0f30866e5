"""First tokens against rates, as a picture."""

import math
from collections.abc import Sequence
from pathlib import Path

from bench.traffic.measure import CellResult

__all__ = ["draw_levels"]

_COLOURS = {"off": "tab:gray", "exact": "tab:orange", "compose": "tab:blue"}


def draw_levels(results: Sequence[CellResult], path: Path) -> bool:
    """A panel a workload, a line a mode; levels without a 95th percentile stand at the top. False without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(own.cell.workload.name for own in results if own.levels))
    if not names:
        return True
    figure, panels = pyplot.subplots(1, len(names), figsize=(5 * len(names), 4.5), layout="constrained", squeeze=False)
    for name, panel in zip(names, panels[0], strict=True):
        for own in (one for one in results if one.cell.workload.name == name):
            levels = sorted(own.levels, key=lambda level: level.rate)
            finite = [level for level in levels if math.isfinite(level.first_token_p95)]
            colour = _COLOURS[own.cell.mode]
            panel.plot(
                [level.rate for level in finite],
                [level.first_token_p95 for level in finite],
                marker="o",
                color=colour,
                label=own.cell.mode,
            )
            for level in levels:
                if not math.isfinite(level.first_token_p95):
                    panel.axvline(level.rate, color=colour, linestyle=":", linewidth=0.8)
        for promise in {bracket.promise for own in results for bracket in own.brackets}:
            panel.axhline(promise, color="black", linewidth=0.5)
        panel.set(xscale="log", yscale="log", title=name, xlabel="requests a second", ylabel="TTFT p95, s")
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
