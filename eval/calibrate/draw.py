"""The front as a picture: divergence against what it costs."""

from collections.abc import Sequence
from pathlib import Path

from eval.calibrate.choice import Measured, front

__all__ = ["draw_front"]


def draw_front(measured: Sequence[Measured], chosen: Measured, path: Path) -> None:
    """A line a prime, refreshed blocks as squares, the front in black, the chosen setting ringed.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    timed = chosen.seconds is not None
    factor = 1000 if timed else 100
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for prime in dict.fromkeys(own.setting.prime for own in measured):
        own = [each for each in measured if each.setting.prime is prime]
        plain = sorted((each for each in own if each.setting.refresh is None), key=lambda each: each.cost)
        refreshed = [each for each in own if each.setting.refresh is not None]
        (line,) = axes.plot(
            [factor * each.cost for each in plain],
            [each.kl.value for each in plain],
            marker="o",
            label=f"prime {prime}",
        )
        axes.plot(
            [factor * each.cost for each in refreshed],
            [each.kl.value for each in refreshed],
            marker="s",
            linestyle="",
            color=line.get_color(),
        )
    best = front(measured)
    axes.plot([factor * own.cost for own in best], [own.kl.value for own in best], "k:", label="front")
    low, high = chosen.kl.value - chosen.kl.low, chosen.kl.high - chosen.kl.value
    axes.errorbar(
        [factor * chosen.cost],
        [chosen.kl.value],
        yerr=[[max(low, 0.0)], [max(high, 0.0)]],
        marker="o",
        markersize=14,
        markerfacecolor="none",
        color="red",
        label="chosen, with its interval",
    )
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.set(
        xlabel="predicted time to the first token, ms" if timed else "live document tokens, %",
        ylabel="KL from a full recompute, nats a token",
        title="Divergence against cost (squares: with refreshed blocks)",
    )
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
