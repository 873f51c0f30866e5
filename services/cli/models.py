"""`hypic models`: which families are served, and what one checkpoint would take."""

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(
    help="List the model families that are served; `check` describes one checkpoint.", invoke_without_command=True
)

_JSON = typer.Option("--json", help="One JSON object in place of text.")


class Gpu(StrEnum):
    """GPUs whose memory is known."""

    A100 = "a100"
    H100 = "h100"
    H200 = "h200"
    B200 = "b200"


@app.callback()
def families(context: typer.Context, as_json: Annotated[bool, _JSON] = False) -> None:
    """List the model families that are served, and what each was verified against."""
    if context.invoked_subcommand is not None:
        return
    from services.cli.models_text import families_text
    from services.worker.inspection.families import FAMILY_NOTES, WEIGHT_FORMATS

    listed = {"families": [asdict(notes) for notes in FAMILY_NOTES], "weights": WEIGHT_FORMATS}
    typer.echo(_json(listed) if as_json else families_text(FAMILY_NOTES))


@app.command()
def check(
    directory: Annotated[Path, typer.Argument(help="Directory with config.json, and with weights or without.")],
    gpu: Annotated[Gpu | None, typer.Option(help="Say what fits beside the weights on this GPU.")] = None,
    gpu_bytes: Annotated[int | None, typer.Option(min=1, help="The same for another GPU, by its memory.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Split the model over so many of these GPUs.")] = 1,
    body_tokens: Annotated[
        int, typer.Option(min=1, help="Length of a segment's body where states are counted.")
    ] = 2048,
    text: Annotated[
        Path | None, typer.Option(help="Load the model, capture this text, and measure how long heads remember.")
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Describe a checkpoint: shapes, sizes, what fits a GPU, what does not match. Weights are not loaded without --text.

    The exit status is 1 when the weights do not match the config, 2 when the directory cannot be read or is not supported.
    """
    from services.cli.models_text import report_text
    from services.worker.errors import WorkerError
    from services.worker.inspection.capacity import GPU_BYTES, CapacityAssumptions
    from services.worker.inspection.measured import measure_decays
    from services.worker.inspection.report import inspect_checkpoint

    if gpu is not None and gpu_bytes is not None:
        raise typer.BadParameter("give --gpu or --gpu-bytes, not both")
    try:
        memory = gpu_bytes if gpu is None else GPU_BYTES[gpu]
        report = inspect_checkpoint(directory, memory, CapacityAssumptions(body_tokens=body_tokens, num_gpus=gpus))
        if text is not None:
            report = measure_decays(report, text)
    except (WorkerError, OSError, UnicodeDecodeError) as error:
        typer.echo(f"hypic models check: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(_json(asdict(report)) if as_json else report_text(report))
    if report.weights is not None and not report.weights.is_servable:
        raise typer.Exit(1)


def _json(content: object) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False)
