"""`hypic calibrate`: measures a checkpoint on prompts, chooses a profile, and writes it with its calibration card."""

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from eval.calibrate.card import HEAD, card_setting, setting_line
from eval.calibrate.choice import Keep, MostLive, MostLoss, Rule, front
from eval.calibrate.run import USUAL_NATS, Calibrated, Calibration, CalibrationOptions
from eval.checks import EvaluationError, check_device
from eval.live.errors import LiveEvaluationError
from services.common.settings import SettingsError
from services.router.domain.errors import RouterError
from services.worker.errors import WorkerError
from services.worker.settings import WorkerSettings

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_INTERRUPTED = 130
# Between two lines of progress.
_QUIET_SECONDS = 10.0


class Dtype(StrEnum):
    """Of weights, keys and values."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@app.command()
def calibrate(  # noqa: PLR0913 # one parameter an option
    checkpoint: Annotated[
        Path, typer.Argument(help="Directory of the checkpoint, with the profile that is served now.")
    ],
    prompts: Annotated[
        Path, typer.Option(help="JSON lines: question, documents, and system where it is not the deployment's.")
    ],
    system: Annotated[
        Path | None,
        typer.Option(help="Text file: the deployment's system prompt. Default: the one that all prompts name."),
    ] = None,
    loss: Annotated[
        float | None,
        typer.Option(
            min=1e-6, max=10.0, help="Choose the cheapest setting whose mean KL is below so many nats. Default: 0.05."
        ),
    ] = None,
    live_share: Annotated[
        float | None,
        typer.Option(min=0.0, max=100.0, help="Choose the best setting with so many percent of document tokens live."),
    ] = None,
    keep_profile: Annotated[
        bool, typer.Option("--keep-profile", help="Choose nothing: a card for the profile as it is.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, max=1024, help="First tokens of a reply that are compared.")] = 8,
    seconds: Annotated[float, typer.Option(min=1, help="No prompt begins after this time.")] = 600.0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        Dtype, typer.Option(help="As the worker serves: a card of another one is refused.")
    ] = Dtype.FLOAT32,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of a tensor operation.")] = 1,
    profile: Annotated[
        Path | None, typer.Option(help="The profile that is served, where it is not the checkpoint's.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of what is written. Default: calibration/NAME.")] = None,
) -> None:
    """Measure what composing loses of a model's answers under every kind of profile, on your own prompts, without labels.

    Every prompt runs in full, and composed behind different primes and seam windows, with refreshed blocks and with compact
    states. Written: profile.toml and calibration.json, which workers load, calibration.md and front.png, for people, and
    outcomes.jsonl, with which the next run goes on.

    Status: 0 calibrated; 1 no setting keeps to --loss or --live-share, and nothing is chosen; 2 files or options cannot be used;
    130 interrupted, with what was measured kept.
    """
    try:
        rule = _rule(loss, live_share, keep=keep_profile)
        check_device(device)
        settings = _worker_settings(checkpoint, profile, device, dtype)
        folder = out or Path("calibration") / checkpoint.resolve().name
        _make_folder(folder)
        command = shlex.join(["hypic", "calibrate", *_without_folders(sys.argv[2:])])
        options = CalibrationOptions(settings, prompts, system, rule, tokens, seconds, folder, command)
        with _on_threads(threads):
            done = Calibration(options, _ProgressLines()).run()
    except (EvaluationError, LiveEvaluationError, SettingsError, WorkerError, RouterError, OSError) as error:
        typer.echo(f"hypic calibrate: {error}", err=True)
        raise typer.Exit(2) from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        fault = (str(error) or "memory is used up").splitlines()[0]
        typer.echo(f"hypic calibrate: {fault}; leave out the longest prompts", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        typer.echo("hypic calibrate: interrupted; what was measured is kept, run it again to go on", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    typer.echo("\n".join(_report(done, rule, folder)))
    raise typer.Exit(1 if done.card is None else 0)


@contextmanager
def _on_threads(threads: int) -> Iterator[None]:
    """Denormal numbers count as 0: strong decays leave many, and they slow matrix products down."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


def _rule(loss: float | None, live_share: float | None, *, keep: bool) -> Rule:
    if (loss is not None) + (live_share is not None) + keep > 1:
        raise EvaluationError("--loss, --live-share and --keep-profile are three rules; give one")
    if keep:
        return Keep()
    if live_share is not None:
        return MostLive(live_share / 100)
    return MostLoss(USUAL_NATS if loss is None else loss)


def _worker_settings(checkpoint: Path, profile: Path | None, device: str, dtype: Dtype) -> WorkerSettings:
    named = {} if profile is None else {"profile": profile}
    return WorkerSettings.from_environment(checkpoint=checkpoint, device=device, dtype=dtype.value, **named)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvaluationError(f"--out {folder}: cannot be made ({error.strerror}); give another place") from error


def _without_folders(words: list[str]) -> list[str]:
    """The card goes to whoever asks the router for it by digest: where files lay is told to nobody."""
    return [Path(word).name if "/" in word and not word.startswith("-") else word for word in words]


class _ProgressLines:
    """A line on standard error now and then."""

    def __init__(self) -> None:
        self._told_at = time.monotonic()

    def __call__(self, done: int, total: int, elapsed_seconds: float) -> None:
        now = time.monotonic()
        if done < total and now - self._told_at < _QUIET_SECONDS:
            return
        self._told_at = now
        left = elapsed_seconds / done * (total - done)
        typer.echo(f"prompt {done} of {total} after {elapsed_seconds:.0f} s, {left:.0f} s to go at most", err=True)


def _report(done: Calibrated, rule: Rule, folder: Path) -> list[str]:
    best = {own.setting for own in front(done.settings)}
    rows = [card_setting(own, on_front=own.setting in best) for own in done.settings]
    lines = [
        HEAD,
        f"| --- | --- |{' ---: |' * 5}",
        *(setting_line(own, done.full_seconds) for own in rows if own.on_front),
    ]
    lines += ["", *(f"note: {note}" for note in done.notes)]
    card = done.card
    if card is None:
        least = min(own.kl.high for own in rows)
        return [
            *lines,
            f"nothing is chosen: wanted is {rule}, and the least upper end is {least:.4f} nats; raise --loss or --live-share",
        ]
    lines += [
        f"chosen, {card.rule}: {card.chosen.name}, {card.chosen.encoding}",
        f"written to {folder}: profile.toml and calibration.json (put both beside the checkpoint, or name them with"
        " HYPIC_WORKER_PROFILE and HYPIC_WORKER_CALIBRATION), calibration.md, front.png",
    ]
    if card.chosen.refresh:
        lines.append(f"set HYPIC_ROUTER_REFRESH={card.chosen.refresh}: without, the card does not count")
    return lines
