"""What is looked at before an evaluation begins: minutes of answers must not end in a fault that could be seen at once."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import typer

from eval.prompts import PromptReader
from services.router.domain.errors import RouterError
from services.worker.errors import WorkerError
from services.worker.models.registry import read_checkpoint_spec

__all__ = ["EvaluationError", "check_demo_prompts", "check_device", "check_output", "one_line_on_faults"]


class EvaluationError(Exception):
    """The evaluation cannot be done; one line that names the file or option, and the remedy."""


@contextmanager
def one_line_on_faults(command: str) -> Iterator[None]:
    """Ends the process with status 2 and one line where the user's files or options are at fault."""
    try:
        yield
    except (EvaluationError, WorkerError, RouterError, OSError) as error:
        typer.echo(f"hypic eval {command}: {error}", err=True)
        raise typer.Exit(2) from error


def check_device(device: str) -> None:
    """Whether torch can run there.

    Raises:
        EvaluationError: it cannot.
    """
    if device not in ("cpu", "cuda"):
        raise EvaluationError(f"--device {device} is not known; give cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise EvaluationError("--device cuda: torch sees no GPU; give cpu")


def check_output(path: Path) -> None:
    """Whether a file can be written there; its folder is made.

    Raises:
        EvaluationError: it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise EvaluationError(f"--out {path}: cannot be written ({error.strerror}); give another place") from error
    if path.is_dir():
        raise EvaluationError(f"--out {path}: is a folder; name a file in it")


def check_demo_prompts(checkpoint: Path) -> None:
    """Whether the demo model's questions can be asked of a checkpoint.

    Raises:
        CheckpointError: its config cannot be read or is not supported.
        EvaluationError: its tokenizer is missing, or has not the tokens of the demo's prompts.
    """
    read_checkpoint_spec(checkpoint)
    try:
        PromptReader(checkpoint)
    except Exception as error:  # the tokenizer library raises nothing more precise
        raise EvaluationError(
            f"{checkpoint / 'tokenizer.json'}: not usable for the demo's questions ({error}); use `hypic eval passages`"
        ) from error
