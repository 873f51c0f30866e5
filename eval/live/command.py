"""`hypic eval --against URL`: what reuse changes of the answers that a deployment gives."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from eval.live.asking import Asked, Endpoint, ask_all
from eval.live.errors import LiveEvaluationError
from eval.live.paired import PairedResult, compare_pairs
from eval.live.questions import LiveQuestion, read_live_questions

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_FLIPS_SHOWN = 20
_INTERRUPTED = 130


@app.command()
def against(  # noqa: PLR0913 # one parameter an option
    against: Annotated[str, typer.Option(help="Address of the endpoint, as http://127.0.0.1:8000.")],
    questions: Annotated[Path, typer.Option(help="JSON lines: question, documents, and answers where they are known.")],
    api_key: Annotated[str, typer.Option(envvar="HYPIC_API_KEY", help="Where the endpoint wants one.")] = "",
    model: Annotated[str, typer.Option(help="Default: the one that is served.")] = "",
    count: Annotated[int, typer.Option(min=1, help="At most so many questions of the file.")] = 1_000_000,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Questions in flight.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest reply.")] = 64,
    timeout_seconds: Annotated[float, typer.Option(min=0.1, help="Of one reply.")] = 120.0,
    contains: Annotated[bool, typer.Option("--contains", help="A reply that holds an answer is right.")] = False,
    max_loss: Annotated[
        float, typer.Option(min=-100, max=100, help="Points; the status is 1 where more is lost.")
    ] = 100.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of text.")] = False,
) -> None:
    """Ask a live endpoint every question of a file with reuse off and with compose, and compare the answers in pairs.

    Status: 0 all asked; 1 more than --max-loss points lost; 2 the file, the options or the endpoint cannot be used; 3 some
    questions failed; 130 interrupted, after the report of what was answered.
    """
    endpoint = Endpoint(against, api_key, model, concurrency, max_tokens, timeout_seconds, contains)
    try:
        chosen = read_live_questions(questions)[:count]
        asked = _ask(endpoint, chosen)
        if not asked.pairs and not asked.interrupted:
            first = asked.failures[0]
            raise LiveEvaluationError(f"no question was answered; question {first.id}: {first.reason}")
    except LiveEvaluationError as error:
        typer.echo(f"hypic eval: {error}", err=True)
        raise typer.Exit(2) from error
    result = compare_pairs(asked.pairs) if asked.pairs else None
    typer.echo(_json(asked, result, len(chosen)) if as_json else _text(asked, result, len(chosen)))
    raise typer.Exit(_status(asked, result, max_loss))


def _ask(endpoint: Endpoint, questions: Sequence[LiveQuestion]) -> Asked:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(questions))
        return asyncio.run(ask_all(endpoint, questions, lambda done: bar.update(task, completed=done)))


def _status(asked: Asked, result: PairedResult | None, max_loss: float) -> int:
    if asked.interrupted:
        return _INTERRUPTED
    if result is not None and result.loss is not None and result.loss > max_loss:
        return 1
    return 3 if asked.failures else 0


def _json(asked: Asked, result: PairedResult | None, wanted: int) -> str:
    content = {
        "model": asked.model,
        "revision": asked.revision,
        "wanted": wanted,
        "interrupted": asked.interrupted,
        "result": None if result is None else asdict(result),
        "failures": [asdict(own) for own in asked.failures],
    }
    return json.dumps(content, indent=2, ensure_ascii=False)


def _text(asked: Asked, result: PairedResult | None, wanted: int) -> str:
    lines = [f"{asked.model} {asked.revision[:12]}: {len(asked.pairs)} of {wanted} questions answered both ways"]
    if asked.interrupted:
        lines[0] += ", interrupted"
    if result is not None:
        lines += _result_lines(result)
    lines += [f"failed  {own.id}: {own.reason}" for own in asked.failures[:_FLIPS_SHOWN]]
    if len(asked.failures) > _FLIPS_SHOWN:
        lines.append(f"… and {len(asked.failures) - _FLIPS_SHOWN} more failed; --json lists all")
    return "\n".join(lines)


def _result_lines(result: PairedResult) -> list[str]:
    lines = [
        f"{result.composed_share:.1f} % of prompt tokens came from segment states; {result.changed} replies changed"
    ]
    if result.composed_share == 0:
        lines.append("nothing was reused, so this says nothing of reuse: are the documents long enough for a segment?")
    if result.loss is None:
        lines.append("no question has answers: changed replies are counted, right ones are not")
    else:
        lines.append(
            f"right: {result.off_right:.1f} % off, {result.compose_right:.1f} % compose, of {result.judged};"
            f" points lost {result.loss:.2f} [{result.loss_low:.2f}, {result.loss_high:.2f}] (exact, at least 95 %);"
            f" {result.broken} broken, {result.mended} mended"
        )
    for flip in result.flips[:_FLIPS_SHOWN]:
        lines.append(f"{flip.direction:8}{flip.id}: {flip.question!r}: {flip.off!r} → {flip.compose!r}")
    if len(result.flips) > _FLIPS_SHOWN:
        lines.append(f"… and {len(result.flips) - _FLIPS_SHOWN} more changed; --json lists all")
    return lines
