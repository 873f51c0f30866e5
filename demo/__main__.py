"""`make demo`: starts the stack, asks questions over documents in changing order, shows what was reused, and ends."""

import argparse
import asyncio
from pathlib import Path

from rich.console import Console
from rich.table import Table

from demo.client import Reply, ask, calibration_line
from demo.scenario import QUESTIONS, DemoRequest, Scenario, load_scenario
from services.cli.supervisor import Stack, StackOptions, StackStartError

MODELS = Path(__file__).resolve().parent.parent / "models"


def main() -> int:
    """Returns 0 when every answer was right, 1 when one was wrong, 2 when the stack did not start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(QUESTIONS), default="demo", help="folder in models/")
    model: str = parser.parse_args().model
    # Wide enough for the table also where the output goes to a file.
    console = Console(width=max(Console().width, 118), highlight=False)
    try:
        return asyncio.run(_show(console, model))
    except StackStartError as error:
        console.print(f"demo: {error}", style="red")
        return 2


async def _show(console: Console, model: str) -> int:
    scenario = load_scenario(model)
    stack = Stack(StackOptions(MODELS / model, port=0, log_level="warning"))
    with console.status("starting router, cache service and worker …"):
        await stack.start()
    try:
        return await asyncio.to_thread(_ask_all, console, stack, scenario)
    finally:
        await stack.stop()


def _ask_all(console: Console, stack: Stack, scenario: Scenario) -> int:
    console.print(f"\n{len(scenario.documents)} documents, {stack.model_name} model, {stack.base_url}")
    console.print(f"{calibration_line(stack.base_url)}\n")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("request", no_wrap=True)
    table.add_column("question and answer", overflow="fold")
    for title in ("first token", "computed", "reused", "documents"):
        table.add_column(title, justify="right", no_wrap=True)
    wrong = 0
    replies: list[tuple[DemoRequest, Reply]] = []
    for request in scenario.requests():
        with console.status(request.label):
            reply = ask(stack.base_url, stack.model_name, scenario.system, request)
        replies.append((request, reply))
        wrong += not request.is_right(reply.text)
        table.add_row(*_cells(request, reply))
    console.print(table)
    console.print(_summary(replies, wrong))
    return 1 if wrong else 0


def _cells(request: DemoRequest, reply: Reply) -> tuple[str, ...]:
    verdict = "[green]right[/]" if request.is_right(reply.text) else f"[red]wrong, expected: {request.answer}[/]"
    documents = ", ".join(f"{count} {served}" for served, count in reply.documents.most_common())
    return (
        request.label,
        f"{request.question}\n[bold]{reply.text}[/] ({verdict})",
        f"{1000 * reply.first_token_seconds:.0f} ms",
        str(reply.prompt_tokens - reply.reused_tokens),
        str(reply.reused_tokens),
        documents,
    )


def _summary(replies: list[tuple[DemoRequest, Reply]], wrong: int) -> str:
    composed = replies[-1][1]
    off = next(reply for request, reply in replies if request.reuse == "off")
    ratio = off.first_token_seconds / composed.first_token_seconds
    return (
        f"\n{len(replies) - wrong} of {len(replies)} answers right. Same prompt, composed against no reuse: first token "
        f"{ratio:.1f} times sooner,\n{composed.prompt_tokens - composed.reused_tokens} of {composed.prompt_tokens} "
        "tokens computed."
        "\n`make run` keeps the stack serving and shows how to call it."
    )


if __name__ == "__main__":
    raise SystemExit(main())
