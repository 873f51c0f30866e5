"""The table of docs/quality.md on questions over passages, from the rows of `eval.passages`."""

from bench.results import ResultFile

__all__ = ["passage_table"]


def passage_table(result: ResultFile) -> list[str]:
    """One line a setting: shares in percent, divergences in nats, each loss with its 95 % interval."""
    values = {row.measure: row.value for row in result.rows}
    settings = dict.fromkeys(measure.partition(" / ")[0] for measure in values)
    columns = (
        "setting",
        "live",
        "KL, first token",
        "KL, answer",
        "answers changed",
        "F1",
        "F1 lost",
        "exact match lost",
        "n",
    )
    lines = [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 1)}"]
    return [*lines, *(_line(setting, values) for setting in settings)]


def _line(setting: str, values: dict[str, float]) -> str:
    def interval(measure: str, digits: int) -> str:
        name = f"{setting} / {measure}"
        value, low, high = (values[f"{name}{end}"] for end in ("", ", low end", ", high end"))
        # Rounding makes no negative zero.
        return f"{value + 0.0:.{digits}f} [{low + 0.0:.{digits}f}, {high + 0.0:.{digits}f}]"

    cells = [
        setting,
        f"{values[f'{setting} / live share']:.1f} %",
        interval("first token KL", 3),
        interval("answer KL", 3),
        f"{values[f'{setting} / answers changed']:.0f} %",
        f"{values[f'{setting} / token F1']:.1f}",
        interval("token F1 lost", 1),
        interval("exact match lost", 1),
        f"{values[f'{setting} / questions']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"
