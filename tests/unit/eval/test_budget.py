"""The front of loss against live tokens, from outcomes to the page's table."""

from collections.abc import Sequence
from pathlib import Path

from bench.results import write_results
from eval.budget import budget_rows, budget_table
from eval.presets import DEFAULT_SETTING, PUBLISHED, PUBLISHED_FRONT, REFRESH_FRONT
from eval.scoring import Outcome, Scores

# Tokens of the pass that looks for blocks.
LOOKED = 9
SETTINGS = ["off", *(own.name for own in (DEFAULT_SETTING, *PUBLISHED_FRONT, *REFRESH_FRONT))]


def _outcomes(wrong: dict[str, int], live: dict[str, int], questions: int = 20) -> list[Outcome]:
    """The first `wrong` questions of a setting are answered wrongly, with `live` of 100 document tokens."""
    return [
        Outcome(
            question=number,
            setting=setting,
            scores=Scores("x", number >= wrong.get(setting, 0), 1.0, True, 0.1, 0.1),
            live_tokens=live[setting],
            document_tokens=100,
            run_share=(live[setting] + LOOKED) / 100,
        )
        for setting in SETTINGS
        for number in range(questions)
    ]


def _values(outcomes: Sequence[Outcome]) -> dict[str, float]:
    return {row.measure: row.value for row in budget_rows(outcomes)}


def test_a_front_that_is_better_everywhere_and_one_that_is_not() -> None:
    live = dict.fromkeys(SETTINGS, 30) | {own.name: 20 for own in REFRESH_FRONT}
    lossy = {own.name: 8 for own in PUBLISHED_FRONT}
    better = _values(_outcomes(lossy | {own.name: 2 for own in REFRESH_FRONT}, live))
    matched, ratio = (own for own in better if " / " not in own)
    assert (better[matched], better[ratio]) == (len(PUBLISHED_FRONT), 0.25)
    assert better[f"{PUBLISHED.name} / points lost"] == 40.0
    dearer = live | {own.name: 31 for own in REFRESH_FRONT}
    assert _values(_outcomes(lossy | {own.name: 2 for own in REFRESH_FRONT}, dearer))[matched] == 0
    assert _values(_outcomes(lossy | {own.name: 9 for own in REFRESH_FRONT}, live))[matched] == 0


def test_both_passes_count_towards_the_time() -> None:
    """32 live tokens of 100 and the pass that looks for them are 41 % of a full recompute's."""
    last = REFRESH_FRONT[-1].name
    lossy = {own.name: 8 for own in PUBLISHED_FRONT} | {own.name: 4 for own in REFRESH_FRONT} | {last: 1}
    ratios = []
    for live in (30, 32):
        values = _values(_outcomes(lossy, dict.fromkeys(SETTINGS, 20) | {last: live}))
        ratios += [value for name, value in values.items() if "tokens run, over" in name]
    assert ratios == [0.125, 0.5]


def test_only_questions_that_all_settings_were_asked_count() -> None:
    live = dict.fromkeys(SETTINGS, 30)
    outcomes = [own for own in _outcomes({}, live) if own.setting != PUBLISHED.name or own.question < 7]
    values = _values(outcomes)
    assert {values[f"{setting} / questions"] for setting in SETTINGS} == {7}


def test_the_table_names_every_setting(tmp_path: Path) -> None:
    rows = budget_rows(_outcomes({PUBLISHED.name: 4}, dict.fromkeys(SETTINGS, 30)))
    table = budget_table(write_results(tmp_path / "rows.json", "a command", "a device", rows))
    assert table[0].endswith("`a command`")
    for setting in SETTINGS:
        assert sum(f"| {setting} |" in line for line in table) == 1
    assert any(
        "| published | compose w8 prime system | 30.0 % | 39.0 % | 80.0 |" in line and "20.00 [" in line
        for line in table
    )
