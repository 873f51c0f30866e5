"""The command line of the evaluation: run it, and make tables, plot and page from what it stored."""

import shlex
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from eval.checks import EvaluationError, check_demo_prompts, check_device, check_output, one_line_on_faults
from eval.pack import BatchLimits
from eval.plans import PLANS, SEED
from eval.question_sets import QuestionSet, SetKind
from eval.records import RunRecord, describe_run, merge_records, read_record, write_record
from eval.report import write_report
from eval.runner import RunOptions, Stage, evaluate
from services.worker.models.registry import read_checkpoint_spec

__all__ = ["app"]

app = typer.Typer(
    name="eval",
    help="Answer quality of every reuse mode against a full recompute. `--against URL` in place of a command asks a live"
    " endpoint: `hypic eval --against URL --help`.",
    add_completion=False,
)

_RESULTS = Path("eval/results")
_OUTCOMES = _RESULTS / "outcomes.json.gz"


class PlanName(StrEnum):
    """ci, short, budget: two cores; long: one GPU, all settings; confirm: one GPU, few settings on thousands of questions."""

    BUDGET = "budget"
    CI = "ci"
    SHORT = "short"
    LONG = "long"
    CONFIRM = "confirm"


@app.command()
def run(
    checkpoint: Annotated[Path, typer.Option(help="Directory of the checkpoint.")] = Path("models/demo"),
    plan: Annotated[PlanName, typer.Option(help="Which questions and settings.")] = PlanName.SHORT,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    workers: Annotated[int, typer.Option(help="Processes; each loads a model of its own.", min=1)] = 2,
    seconds: Annotated[float, typer.Option(help="No pack of questions begins after this time.", min=1)] = 420.0,
    scale: Annotated[float, typer.Option(help="Factor on the number of questions, at most 1000.")] = 1.0,
    out: Annotated[Path, typer.Option(help="Where the raw outcomes go.")] = _OUTCOMES,
) -> None:
    """Ask questions under reuse modes and store every outcome; `report` makes the tables of the long plan."""
    with one_line_on_faults("run"):
        # Written so that NaN, which is a number to the command line, is refused too.
        if not 0.0 < scale <= 1000.0:
            raise EvaluationError(f"--scale must lie above 0 and be at most 1000, not {scale}")
        check_device(device)
        check_demo_prompts(checkpoint)
        check_output(out)
        options = RunOptions(
            checkpoint=checkpoint,
            device=device,
            stages=PLANS[plan.value].stages(seconds, scale),
            pack_prompts=4 if device == "cpu" else 12,
            workers=workers,
            arena_tokens=100_000 if device == "cpu" else 600_000,
            limits=BatchLimits(8_192, 128) if device == "cpu" else BatchLimits(80_000, 400),
        )
        record = _run(options)
        write_record(out, record)
        questions = {own.question for own in record.outcomes}
        print(f"{len(questions)} questions, {len(record.outcomes)} answers in {record.seconds:.0f} s → {out}")
        if plan in (PlanName.CI, PlanName.SHORT):
            print(write_report(record, checkpoint, out.with_name(plan.value)))


def _run(options: RunOptions) -> RunRecord:
    began = time.monotonic()
    outcomes = evaluate(options)
    elapsed = time.monotonic() - began
    if not outcomes:
        raise EvaluationError("no question was answered in time; raise --seconds")
    command = shlex.join(["hypic", "eval", "run", *sys.argv[2:]])
    sets = sorted((own for stage in options.stages for own in stage.sets), key=lambda own: own.count)
    largest = {own.kind: own for own in sets}
    return describe_run(
        _device_name(options.device, options.workers), command, elapsed, list(largest.values()), outcomes
    )


def _device_name(device: str, workers: int) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {workers} workers"


@app.command()
def oracle(
    checkpoint: Annotated[Path, typer.Option(help="Directory of the checkpoint.")] = Path("models/demo"),
    count: Annotated[int, typer.Option(help="How many of the standard questions.", min=1)] = 24,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    workers: Annotated[int, typer.Option(help="Processes; each loads both models.", min=1)] = 2,
    out: Annotated[Path, typer.Option(help="Where the rows go; the differing questions go beside them.")] = (
        _RESULTS / "oracle.json"
    ),
) -> None:
    """Compare the greedy answers of full recompute, token by token, with those of `transformers` (extra `dev`)."""
    # transformers takes seconds to import, and no other command needs it.
    from eval.comparison import write_comparison
    from eval.oracle import OracleOptions, compare_answers

    questions = QuestionSet(SetKind.STANDARD, count, SEED)
    options = OracleOptions(checkpoint, device, questions, pack_prompts=2 if device == "cpu" else 8, workers=workers)
    command = f"hypic eval oracle --count {count} --device {device} --workers {workers}"
    with one_line_on_faults("oracle"):
        check_device(device)
        check_demo_prompts(checkpoint)
        check_output(out)
        print(write_comparison(out, command, _device_name(device, workers), compare_answers(options)))


@app.command()
def encodings(
    checkpoint: Annotated[Path, typer.Option(help="Directory of the checkpoint.")] = Path("models/demo"),
    count: Annotated[int, typer.Option(help="How many of the standard questions, half as many others.", min=4)] = 80,
    seconds: Annotated[float, typer.Option(help="No pack of questions begins after this time.", min=1)] = 1200.0,
    workers: Annotated[int, typer.Option(help="Processes; each loads a model of its own.", min=1)] = 2,
    shape: Annotated[Path, typer.Option(help="Directory with the config.json whose segments are sized.")] = Path(
        "tests/data/configs/Qwen3.5-35B-A3B"
    ),
    out: Annotated[Path, typer.Option(help="Where the rows go.")] = Path("bench/results/store.json"),
) -> None:
    """Divergence and size of every encoding of stored states, and of two that are wrong where heads remember."""
    from bench.results import cpu_device, merge_results
    from eval.encodings import compare_encodings, encoding_rows, encoding_settings, measure_decays

    sets = tuple(
        QuestionSet(kind, size, SEED)
        for kind, size in ((SetKind.STANDARD, count), (SetKind.REFERENCES, count // 4), (SetKind.LONG, count // 4))
    )
    with one_line_on_faults("encodings"):
        check_demo_prompts(checkpoint)
        check_output(out)
        stage = Stage(sets, encoding_settings(), seconds)
        outcomes = evaluate(RunOptions(checkpoint, "cpu", (stage,), 2, workers, 100_000, BatchLimits(8_192, 128)))
        if not outcomes:
            raise EvaluationError("no question was answered in time; raise --seconds")
        spec = read_checkpoint_spec(shape)
        rows = encoding_rows(compare_encodings(outcomes), measure_decays(checkpoint, sets), spec)
        command = shlex.join(["hypic", "eval", *sys.argv[1:]])
        merge_results(out, command, cpu_device(), "encodings", rows)
    for row in rows:
        print(f"{row.value:10.4g} {row.measure}")


@app.command()
def passages(
    questions: Annotated[Path, typer.Option(help="JSON file: a list of question, answers, ctxs with a text each.")],
    checkpoint: Annotated[Path, typer.Option(help="Directory of the checkpoint.")] = Path("models/smollm2"),
    count: Annotated[
        int, typer.Option(min=1, help="At most so many of the questions whose answer stands in a passage.")
    ] = 40,
    seconds: Annotated[float, typer.Option(min=1, help="No question begins after this time.")] = 600.0,
    document_tokens: Annotated[
        int, typer.Option(min=1, help="Longest passage; longer ones are cut at a sentence.")
    ] = 160,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Where the rows go.")] = _RESULTS / "smollm2.json",
) -> None:
    """Compose documents of a question file under any checkpoint, against a full recompute."""
    from eval.passages import PassageOptions, run_passages, write_passages

    options = PassageOptions(checkpoint, questions, count, seconds, document_tokens, device)
    # The file is the caller's own: its name is told, not where it lies.
    told = {questions: questions.name, out: out.name}
    words = [told.get(Path(word), word) for word in sys.argv[1:]]
    with one_line_on_faults("passages"):
        check_device(device)
        check_output(out)
        outcomes = run_passages(options)
        write_passages(out, options, shlex.join(["python", "-m", "eval", *words]), outcomes)


@app.command()
def budget(
    record: Annotated[Path, typer.Argument(help="File that `run --plan budget` wrote.")],
    out: Annotated[Path, typer.Option(help="Where the rows go.")] = _RESULTS / "quality_budget.json",
) -> None:
    """Rows of loss against live tokens from stored outcomes: refreshed blocks beside the published method."""
    from bench.results import write_results
    from eval.budget import budget_rows

    with one_line_on_faults("budget"):
        check_output(out)
        stored = read_record(record)
        try:
            rows = budget_rows(stored.outcomes)
        except (KeyError, ZeroDivisionError, ValueError) as error:
            raise EvaluationError(
                f"{record}: lacks settings or questions of `run --plan budget`; run it anew"
            ) from error
        command = " ".join(Path(word).name if word == str(record) else word for word in stored.command.split())
        write_results(out, command, stored.device, rows)
    for row in rows:
        print(f"{row.value:10.4g} {row.measure}")


@app.command()
def report(
    records: Annotated[list[Path], typer.Argument(help="Files that `run` wrote, of one checkpoint.")],
    checkpoint: Annotated[Path, typer.Option(help="Directory of the checkpoint.")] = Path("models/demo"),
    name: Annotated[str, typer.Option(help="Files are named so.")] = "demo",
) -> None:
    """Tables, rows, failures and plot from stored outcomes, into eval/results."""
    with one_line_on_faults("report"):
        check_demo_prompts(checkpoint)
        print(write_report(merge_records([read_record(path) for path in records]), checkpoint, _RESULTS / name))
