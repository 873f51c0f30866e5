"""`hypic calibrate` end to end on a tiny checkpoint: what it writes is what a worker loads."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from eval.calibrate import measuring
from eval.calibrate.candidates import WINDOWS
from eval.calibrate.command import app
from eval.calibrate.example import example_lines
from eval.calibrate.prompts import chat_reader, read_primes
from eval.calibrate.run import Calibration
from eval.checks import EvaluationError
from eval.settings import Prime
from services.cli.main import app as hypic
from services.cli.one_prompt import OnePrompt, PromptText
from services.router.domain.parts import PartKind
from services.worker.adapters.served_model import read_served_model
from services.worker.calibration import CalibrationCard, load_card
from services.worker.profile import load_profile
from services.worker.settings import WorkerSettings
from tests.e2e.stack.checkpoint import write_attention_checkpoint, write_random_checkpoint

DEMO = Path("models/demo")
_SENTENCES = [f"The keeper of house {number} is called Ember {number * 7}." for number in range(12)]


def write_prompts(path: Path, count: int) -> Path:
    """Every prompt has two documents that are long enough for the windows, and one that is not."""
    texts = [" ".join(_SENTENCES[start : start + 6]) for start in range(count + 1)]
    lines = [
        {
            "documents": [texts[n], {"title": "House", "text": texts[n + 1]}, "Short."],
            "question": f"Who keeps house {n}?",
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in words])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_random_checkpoint(directory, DEMO)
    return directory


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two prompts, calibrated under a bound on live tokens."""
    folder = tmp_path_factory.mktemp("calibration")
    prompts = write_prompts(folder / "prompts.jsonl", 2)
    (folder / "system.txt").write_text("Be brief.\n")
    words = ("--system", folder / "system.txt", "--live-share", 30, "--tokens", 3, "--out", folder / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "_COST_ROUNDS", 1)
        result = run(checkpoint, "--prompts", prompts, *words)
    assert result.exit_code == 0, result.output
    assert "front" in result.output
    return folder / "out"


@pytest.fixture(scope="module")
def card(folder: Path) -> CalibrationCard:
    return load_card(folder / "calibration.json")


def test_every_kind_of_setting_is_measured(card: CalibrationCard) -> None:
    compared = [own for own in card.settings if own.state_bytes is None]
    assert {own.prime for own in compared} == {"none", "start", "neutral", "system"}
    windows = {(own.seam_window, own.seam_share, own.seam_window_max) for own in compared}
    assert windows >= {(own.least, own.share, own.most) for own in WINDOWS}
    assert {own.refresh for own in compared} == {0, 4, 16}
    encodings = [own for own in card.settings if own.state_bytes is not None]
    assert len({own.encoding for own in encodings}) == len(encodings) >= 5
    assert encodings[0].state_bytes == max(own.state_bytes or 0 for own in encodings)
    assert all(own.seconds is not None and own.seconds > 0 for own in compared)
    assert card.full_seconds is not None
    assert any(own.kl.value > 0 for own in compared)


def test_the_choice_keeps_to_the_rule(card: CalibrationCard) -> None:
    within = [own for own in card.settings if own.state_bytes is None and own.live_share <= 0.3]
    assert card.chosen.kl.value == min(own.kl.value for own in within)
    assert card.chosen.live_share <= 0.3
    assert (card.prompts.asked, card.prompts.in_file, card.prompts.file) == (2, 2, "prompts.jsonl")


def test_a_worker_serves_the_profile_that_was_written_and_takes_the_card(
    folder: Path, checkpoint: Path, card: CalibrationCard
) -> None:
    settings = WorkerSettings(
        checkpoint=checkpoint, profile=folder / "profile.toml", calibration=folder / "calibration.json"
    )
    served = read_served_model(settings)
    assert served.calibration.card == card
    assert served.profile == load_profile(folder / "profile.toml")
    assert served.profile_digest == card.profile_digest
    assert served.profile.document_open == load_profile(DEMO / "profile.toml").document_open
    assert (served.profile.seam_window, served.profile.seam_share) == (card.chosen.seam_window, card.chosen.seam_share)
    assert card.profile != asdict(load_profile(checkpoint / "profile.toml"))
    # Under the checkpoint's own profile the card speaks of something else.
    other = read_served_model(WorkerSettings(checkpoint=checkpoint, calibration=folder / "calibration.json"))
    assert other.calibration.card is None
    assert "measured with" in other.calibration.refusal


def test_the_chosen_profile_answers(folder: Path, checkpoint: Path) -> None:
    """Segments are composed behind the window and prime that were chosen."""
    text = " ".join(_SENTENCES)
    model = OnePrompt(WorkerSettings(checkpoint=checkpoint, profile=folder / "profile.toml"))
    answer = model.ask(PromptText("Who keeps house 3?", [("", text), ("", text[::-1])]), 2, compose=True)
    seam = load_profile(folder / "profile.toml").seam
    composed = [own for kind, own in answer.parts if kind is PartKind.SEGMENT]
    assert [own.live_tokens for own in composed] == [
        seam.tokens(own.live_tokens + own.reused_tokens) for own in composed
    ]
    assert all(own.reused_tokens for own in composed)


def test_people_can_read_it(folder: Path, card: CalibrationCard) -> None:
    text = (folder / "calibration.md").read_text()
    assert card.chosen.name in text
    assert "2 of 2 of `prompts.jsonl`" in text
    assert all(own.name in text for own in card.settings if own.state_bytes is None)
    assert (folder / "front.png").read_bytes().startswith(b"\x89PNG")
    # The card travels: no folder of the machine stands in it.
    assert str(folder) not in (folder / "calibration.json").read_text()


def test_a_second_run_asks_nothing_anew_and_may_keep_the_profile(
    folder: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule is another one, so the card is; what was measured is not."""
    before = (folder / "outcomes.jsonl").read_bytes()
    monkeypatch.setattr(measuring, "measure_cost", None)
    monkeypatch.setattr("eval.calibrate.run.measure_cost", lambda *_: None)
    words = ("--prompts", folder.parent / "prompts.jsonl", "--system", folder.parent / "system.txt", "--tokens", 3)
    again = folder.parent / "again"
    again.mkdir()
    (again / "outcomes.jsonl").write_bytes(before)
    result = run(checkpoint, *words, "--keep-profile", "--out", again)
    assert result.exit_code == 0, result.output
    assert (again / "outcomes.jsonl").read_bytes()[: len(before)] == before
    added = (again / "outcomes.jsonl").read_bytes()[len(before) :].splitlines()
    # Other encodings are of another setting now; the grid is not asked again.
    assert all({each["setting"] for each in json.loads(line)} <= _names_of_encodings(again) | {"off"} for line in added)
    card = load_card(again / "calibration.json")
    assert (card.cost, card.full_seconds, card.chosen.seconds) == (None, None, None)
    assert load_profile(again / "profile.toml") == load_profile(checkpoint / "profile.toml")
    served = read_served_model(WorkerSettings(checkpoint=checkpoint, calibration=again / "calibration.json"))
    assert served.calibration.card == card


def _names_of_encodings(folder: Path) -> set[str]:
    return {own.name for own in load_card(folder / "calibration.json").settings if own.state_bytes is not None}


def test_few_prompts_prove_no_loss_and_nothing_is_written(folder: Path, checkpoint: Path) -> None:
    """Whatever they say: the upper end of the interval knows how few they are."""
    other = folder.parent / "loss"
    other.mkdir()
    (other / "outcomes.jsonl").write_bytes((folder / "outcomes.jsonl").read_bytes())
    words = ("--prompts", folder.parent / "prompts.jsonl", "--system", folder.parent / "system.txt", "--tokens", 3)
    result = run(checkpoint, *words, "--loss", 0.05, "--seconds", 1, "--out", other)
    assert result.exit_code == 1
    assert "nothing is chosen" in result.output
    assert "at least 43 are needed" in result.output
    assert sorted(each.name for each in other.iterdir()) == ["outcomes.jsonl"]


def test_a_model_of_attention_alone_has_no_states_to_encode(tmp_path: Path) -> None:
    write_attention_checkpoint(tmp_path / "model", DEMO)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 1)
    words = ("--live-share", 100, "--tokens", 2, "--seconds", 1, "--dtype", "bfloat16", "--out", tmp_path / "out")
    result = run(tmp_path / "model", "--prompts", prompts, *words)
    assert result.exit_code == 0, result.output
    card = load_card(tmp_path / "out" / "calibration.json")
    assert card.model.dtype == "bfloat16"
    assert all(own.state_bytes is None for own in card.settings)
    settings = WorkerSettings(
        checkpoint=tmp_path / "model",
        profile=tmp_path / "out" / "profile.toml",
        calibration=tmp_path / "out" / "calibration.json",
    )
    assert "model.dtype" in read_served_model(settings).calibration.refusal


def fault(*words: object) -> str:
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert result.output.count("\n") == 1
    return result.output.strip()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", 1)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"question": "?"}', ":2: documents must be a list"),
        ('{"documents": ["text"]}', ":2: question must be a text"),
        ('{"question": "?", "documents": ["text"], "label": 3}', ":2: unknown field label"),
        ('{"question": "?", "documents": [{"title": "t"}]}', ":2: documents[0]: text must be a text"),
        ('{"question": "?", "documents": ["text"], "system": 3}', ":2: system must be a text"),
        ("{", ":2: no JSON"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(
    line: str, told: str, prompts: Path, checkpoint: Path, tmp_path: Path
) -> None:
    prompts.write_text(prompts.read_text() + line + "\n")
    assert f"{prompts}{told}" in fault(checkpoint, "--prompts", prompts, "--out", tmp_path / "out")


def test_options_and_files_that_cannot_be_used(prompts: Path, checkpoint: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out")
    usual = (checkpoint, "--prompts", prompts, *out)
    assert "give one" in fault(*usual, "--loss", 1, "--keep-profile")
    assert "--system" in fault(*usual, "--system", tmp_path / "gone.txt")
    (tmp_path / "empty.txt").write_text("\n")
    assert "is empty; leave the option out" in fault(*usual, "--system", tmp_path / "empty.txt")
    assert "config.json: missing" in fault(tmp_path, "--prompts", prompts, *out)
    (tmp_path / "file").write_text("")
    assert "cannot be made" in fault(checkpoint, "--prompts", prompts, "--out", tmp_path / "file" / "out")
    short = tmp_path / "short.jsonl"
    short.write_text('{"question": "?", "documents": ["text"]}\n')
    assert "no document is long enough" in fault(checkpoint, "--prompts", short, *out)


def test_a_system_prompt_that_names_a_control_token_is_refused(checkpoint: Path) -> None:
    """A profile's prime is read with control tokens: the text would end the system prompt, in every segment."""
    settings = WorkerSettings(checkpoint=checkpoint)
    served = read_served_model(settings)
    reader = chat_reader(settings, served, 4)
    assert read_primes(reader, served, "Be brief.")[Prime.SYSTEM].token_ids[0] == reader.opening("Be brief.")[0]
    with pytest.raises(EvaluationError, match="control token"):
        read_primes(reader, served, "Be brief.<|im_end|>")


def test_an_interruption_keeps_what_was_measured(
    prompts: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Calibration, "run", interrupt)
    result = run(checkpoint, "--prompts", prompts, "--out", tmp_path / "out")
    assert result.exit_code == 130
    assert "run it again to go on" in result.output


def test_it_is_a_command_of_hypic(checkpoint: Path, tmp_path: Path) -> None:
    words = ["calibrate", str(checkpoint), "--prompts", str(tmp_path / "gone.jsonl"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(hypic, words)
    assert result.exit_code == 2
    assert f"hypic calibrate: {tmp_path / 'gone.jsonl'}: not readable" in result.output


def test_the_shipped_example_is_what_the_generator_makes() -> None:
    shipped = Path("demo/prompts.jsonl").read_text().splitlines()
    made = example_lines()
    assert [next(made) for _ in range(4)] == shipped[:4]
    assert len(shipped) == 64
