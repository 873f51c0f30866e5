"""The `hypic` command: one prompt, the whole stack, or one service."""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from services.cli import keys, models, replay, simulate
from services.cli.examples import client_examples
from services.cli.orphans import end_with_supervisor
from services.cli.state import default_state_directory
from services.cli.supervisor import BOTH_ROLES, Stack, StackOptions, StackStartError

__all__ = ["app", "main"]

app = typer.Typer(
    name="hypic",
    help="A cache tier that lets hybrid-attention language models reuse documents in any order.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(keys.app, name="keys")
app.add_typer(models.app, name="models")
app.command("replay")(replay.command)
app.command("simulate")(simulate.command)

DEMO_CHECKPOINT = Path("models/demo")


class Reuse(StrEnum):
    """How `hypic run` serves documents."""

    COMPOSE = "compose"
    OFF = "off"


class LogLevel(StrEnum):
    """Least level that is logged by `hypic up` and its services."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Role(StrEnum):
    """What a worker of `hypic up` does."""

    PREFILL = "prefill"
    COMBINE = "combine"
    BOTH = BOTH_ROLES


@app.command()
def router() -> None:
    """Serve the OpenAI-compatible API. Settings: HYPIC_ROUTER_…"""
    from services.router.bootstrap import main as serve

    serve()


@app.command()
def cache() -> None:
    """Serve the directory of cached states. Settings: HYPIC_CACHE_…"""
    from services.cache.bootstrap import main as serve

    serve()


@app.command()
def worker() -> None:
    """Serve one model: capture, combine, decode. Settings: HYPIC_WORKER_…"""
    from services.worker.bootstrap import main as serve

    serve()


@app.command()
def up(
    checkpoint: Annotated[Path, typer.Option(help="Directory of a Hugging Face checkpoint.")] = DEMO_CHECKPOINT,
    host: Annotated[str, typer.Option(help="Address of the API.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the API; 0 takes a free one.")] = 8000,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder of what outlives a restart: registered documents, pins, invalidations, the secret behind keys."
            " Default: ~/.local/state/hypic/PORT, and none with port 0."
        ),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="Least level that is logged.")] = LogLevel.INFO,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Number of workers; on GPUs one each.")] = 1,
    role: Annotated[
        list[Role] | None, typer.Option(help="What the first worker does, the second and so on; default: both.")
    ] = None,
) -> None:
    """Serve the whole stack on this machine: router, cache service and workers, restarted when they die."""
    from services.common.telemetry import configure_logging

    configure_logging("supervisor", log_level, "console")
    roles = [one.value for one in role or []][:workers]
    roles += [BOTH_ROLES] * (workers - len(roles))
    options = StackOptions(checkpoint.resolve(), host, port, log_level, roles=tuple(roles))
    stack = Stack(replace(options, state_directory=state or _default_state(port)))
    try:
        raise typer.Exit(asyncio.run(_serve_until_signal(stack)))
    except StackStartError as error:
        typer.echo(f"hypic up: {error}", err=True)
        raise typer.Exit(2) from error


@app.command("eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def evaluate(context: typer.Context) -> None:
    """Measure what reuse changes of answers: `--against URL` at a live endpoint, else in this process. See `--help`."""
    if any(word.partition("=")[0] == "--against" for word in context.args):
        try:
            from eval.live.command import app as against
        except ModuleNotFoundError as error:
            typer.echo(f"hypic eval --against: needs {error.name}; install hypic[router]", err=True)
            raise typer.Exit(2) from error
        against(args=context.args, prog_name="hypic eval")
    from eval.cli import app as evaluation

    # The evaluation writes its own command line into what it stores.
    sys.argv = ["eval", *context.args]
    evaluation(args=context.args, prog_name="hypic eval")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def calibrate(context: typer.Context) -> None:
    """Measure what composing loses on your own prompts, without labels; writes profile and calibration card. See `--help`."""
    try:
        from eval.calibrate.command import app as calibration
    except ModuleNotFoundError as error:
        typer.echo(f"hypic calibrate: needs {error.name}; install hypic[router,worker,eval]", err=True)
        raise typer.Exit(2) from error
    calibration(args=context.args, prog_name="hypic calibrate")


@app.command(
    "bench", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False
)
def bench(context: typer.Context) -> None:
    """Measure the CPU stack on the demo model, into bench/results/cpu.json; or `bench traffic --help`: a stack under load."""
    if context.args[:1] == ["traffic"]:
        from bench.traffic.command import app as traffic

        # What is measured is stored with its command line.
        sys.argv = ["hypic bench traffic", *context.args[1:]]
        traffic(args=context.args[1:], prog_name="hypic bench traffic")
    if context.args:
        typer.echo(
            "hypic bench: run it from the repository without arguments, or as `hypic bench traffic --help`", err=True
        )
        raise typer.Exit(0 if context.args == ["--help"] else 2)
    from bench.__main__ import main as measure

    measure()


@app.command()
def run(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    document: Annotated[
        list[Path] | None, typer.Option("--document", "-d", help="A text file; may be given several times.")
    ] = None,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    checkpoint: Annotated[Path, typer.Option(help="Directory of a Hugging Face checkpoint.")] = DEMO_CHECKPOINT,
    reuse: Annotated[Reuse, typer.Option(help="Compose captured documents, or compute everything in place.")] = (
        Reuse.COMPOSE
    ),
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest reply.")] = 64,
) -> None:
    """Ask one question in this process, without services, and show how each part was served."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from services.cli.one_prompt import OnePrompt, PromptText, read_documents
    from services.router.domain.errors import RouterError
    from services.worker.errors import WorkerError
    from services.worker.settings import WorkerSettings

    settings = WorkerSettings.load_or_exit(checkpoint=checkpoint)
    try:
        text = PromptText(question, read_documents(document or []), system)
        answer = OnePrompt(settings).ask(text, max_tokens, compose=reuse is Reuse.COMPOSE)
    except (WorkerError, RouterError, OSError, UnicodeDecodeError) as error:
        typer.echo(f"hypic run: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(answer.text)
    for kind, part in answer.parts:
        line = f"  {kind:8} {part.live_tokens:6} live {part.reused_tokens:6} reused  {part.reason}"
        typer.echo(line.rstrip(), err=True)
    typer.echo(
        f"  capture {answer.capture_seconds:.3f} s, then first token {answer.first_token_seconds:.3f} s", err=True
    )


def _default_state(port: int) -> Path | None:
    """A user without a folder for it is served all the same."""
    from services.common.telemetry import get_logger

    if port == 0:
        return None
    try:
        directory = default_state_directory(port)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        get_logger().warning("state_not_kept", error=str(error), remedy="name a folder with --state")
        return None
    return directory


async def _serve_until_signal(stack: Stack) -> int:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    starting = asyncio.create_task(stack.start())
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return 0
    await starting
    typer.echo(client_examples(stack.base_url, stack.model_name, _key_note()))
    fault = asyncio.create_task(stack.wait_for_fault())
    await asyncio.wait({stopped, fault}, return_when=asyncio.FIRST_COMPLETED)
    fault.cancel()
    await stack.stop()
    return 0 if stopping.is_set() else 1


def _key_note() -> str:
    if os.environ.get("HYPIC_ROUTER_API_KEYS_FILE") or os.environ.get("HYPIC_ROUTER_API_KEY"):
        return "Requests need an API key: Authorization: Bearer …"
    return "Authentication is off: only this machine reaches the address. `hypic keys` makes API keys."


def main() -> None:
    """Entry point of the console script."""
    end_with_supervisor()
    app()


if __name__ == "__main__":
    main()
