"""Loss against live tokens: refreshed blocks beside the published method with wider and wider windows."""

from collections.abc import Sequence

from bench.results import ResultFile, Row
from eval.presets import DEFAULT_SETTING, PUBLISHED, PUBLISHED_FRONT, REFRESH_FRONT
from eval.scoring import Outcome
from eval.settings import Mode
from eval.statistics import Summary, summarise

__all__ = ["budget_rows", "budget_table"]

_GROUP = "all"
# Of the tokens that a full recompute runs, with those of the pass that looks for blocks.
_RUN = 0.4
_REACH = 0.25
_RATIO = f"least loss at up to {_RUN:.0%} of a full recompute's tokens run, over the published method's"
_COUNT_MATCHED = "published points that a refreshed one matches, with no more live tokens and no more loss"


def budget_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """What decides, then the figures of every setting, all on the same questions: those asked under every one of them."""
    settings = {str(Mode.OFF), *(own.name for own in (DEFAULT_SETTING, *PUBLISHED_FRONT, *REFRESH_FRONT))}
    asked = [{own.question for own in outcomes if own.setting == setting} for setting in settings]
    questions = set.intersection(*asked)
    summaries = {own.setting: own for own in summarise(outcomes, {_GROUP: questions}) if own.setting in settings}
    published = [summaries[own.name] for own in PUBLISHED_FRONT]
    refreshed = [summaries[own.name] for own in REFRESH_FRONT]
    return [
        *_decisive(published, refreshed, summaries[PUBLISHED.name]),
        *(row for own in summaries.values() for row in _rows(own)),
    ]


def _decisive(published: Sequence[Summary], refreshed: Sequence[Summary], method: Summary) -> list[Row]:
    matched = sum(any(_is_matched(own, other) for other in refreshed) for own in published)
    rows = [Row(_COUNT_MATCHED, matched, "points", len(published))]
    affordable = [own.loss.value for own in refreshed if own.run_share <= _RUN]
    if method.loss.value > 0 and affordable:
        least = min(affordable)
        rows.append(Row(_RATIO, round(least / method.loss.value, 3), "", _REACH, "lower"))
    return rows


def _is_matched(own: Summary, other: Summary) -> bool:
    return other.live_share <= own.live_share and other.loss.value <= own.loss.value


def _rows(own: Summary) -> list[Row]:
    figures = (
        ("live share", 100 * own.live_share, "%", "lower"),
        ("run share", 100 * own.run_share, "%", "lower"),
        ("exact match", 100 * own.exact, "%", "higher"),
        ("points lost", own.loss.value, "points", "lower"),
        ("points lost, low end", own.loss.low, "points", "lower"),
        ("points lost, high end", own.loss.high, "points", "lower"),
        ("divergence", own.divergence, "nats/token", "lower"),
        ("agreement", 100 * own.agreement, "%", "higher"),
        ("questions", own.questions, "questions", "higher"),
    )
    return [
        Row(f"{own.setting} / {name}", round(value, 4), unit, None, "higher" if better == "higher" else "lower")
        for name, value, unit, better in figures
    ]


def budget_table(result: ResultFile) -> list[str]:
    """Both fronts in order of live share, and what decides."""
    values = {row.measure: row.value for row in result.rows}
    lines = [f"{result.device}; {result.date}; `{result.command}`", ""]
    lines += [
        "| method | setting | live | run | exact | KL | agreement | points lost | n |",
        f"| --- | --- |{' ---: |' * 7}",
    ]
    lines.append(_line("full recompute", str(Mode.OFF), values))
    lines.append(_line("default", DEFAULT_SETTING.name, values))
    for method, settings in (("published", PUBLISHED_FRONT), ("refresh", REFRESH_FRONT)):
        names = sorted((own.name for own in settings), key=lambda name: values[f"{name} / live share"])
        lines += [_line(method, name, values) for name in names]
    decisive = [row for row in result.rows if " / " not in row.measure]
    lines += ["", "| what decides | measured | aim |", "| --- | ---: | ---: |"]
    return [
        *lines,
        *(f"| {row.measure} | {row.value:g} | {row.reach:g} |" for row in decisive if row.reach is not None),
    ]


def _line(method: str, setting: str, values: dict[str, float]) -> str:
    def of(figure: str) -> float:
        # Rounding makes no negative zero.
        return values[f"{setting} / {figure}"] + 0.0

    loss = f"{of('points lost'):.2f} [{of('points lost, low end'):.2f}, {of('points lost, high end'):.2f}]"
    shares = [f"{of('live share'):.1f} %", f"{of('run share'):.1f} %", f"{of('exact match'):.1f}"]
    fidelity = [f"{of('divergence'):.4f}", f"{of('agreement'):.1f}"]
    cells = [method, setting, *shares, *fidelity, loss, f"{of('questions'):.0f}"]
    return f"| {' | '.join(cells)} |"
