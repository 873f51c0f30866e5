"""`python -m bench.gpu SUBJECT … --out FILE`: what each subject measures stands at the head of its module.

Needs torch, triton, numpy, safetensors, tokenizers and typer; the transformers baseline needs transformers, and public kernels
where there are any. `--tiny` runs everything on a CPU in seconds; its figures mean nothing.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.gpu import attention, capture, decode, families, memory, mixed, parallel, recompute, rounding, ttft
from bench.gpu.gate import measure_agreement
from bench.gpu.rig import Rig
from bench.gpu.sizes import TINY, TRUE, Sizes
from bench.results import Row, merge_results

_CONFIG = Path("tests/data/configs/Qwen3.5-35B-A3B")
_TINY_CONFIG = Path(__file__).parent / "tiny"
_ALL, _GATE, _PARALLEL = "all", "gate", "parallel"


class GateError(Exception):
    """Composed prompts do not say what a recompute says."""


def gate(rig: Rig) -> Iterator[Row]:
    """How near composed prompts are to a recompute."""
    agreement = measure_agreement(rig)
    layers = f"behind {rig.first_of_each_kind} layers"
    yield Row(f"relative error of an exact composition's logits {layers}", agreement.composed, "", better="lower")
    yield Row(f"the same with another segment's state {layers}", agreement.mistaken, "")
    if not agreement.is_good:
        raise GateError("composed prompts do not say what a recompute says; nothing behind this is kept")


# In the order in which they run: recompute first, since its other process needs the device for itself, families last, since
# they take the model's place, and behind them what takes other devices too.
SUBJECTS: dict[str, Callable[[Rig], Iterator[Row]]] = {
    "recompute": recompute.measure,
    _GATE: gate,
    "ttft": ttft.measure,
    "capture": capture.measure,
    "decode": decode.measure,
    "mixed": mixed.measure,
    "memory": memory.measure,
    "attention": attention.measure,
    "rounding": rounding.measure,
    "families": families.measure,
    _PARALLEL: parallel.measure,
}
_UNGATED = {"recompute", "attention", "families", _PARALLEL}


def run(rig: Rig, chosen: Sequence[str], keep: Callable[[str, Sequence[Row]], object]) -> list[str]:
    """Measure subjects, printing rows as they come; `keep` gets a subject's rows. Returns the subjects that failed."""
    failed: list[str] = []
    for subject in chosen:
        started, rows = time.perf_counter(), list[Row]()
        print(f"{subject}", flush=True)
        try:
            for row in SUBJECTS[subject](rig):
                print(f"{row.value:12.4g} {row.unit:10} {row.measure}{_verdict(row)}", flush=True)
                rows.append(row)
        except Exception as error:  # whatever one subject dies of, the others are still to be measured
            print(f"  FAILED  {subject}: {type(error).__name__}: {str(error)[:2000]}", flush=True)
            failed.append(subject)
        if rows and (subject in _UNGATED or _GATE not in failed):
            keep(subject, rows)
        rig.clear()
        print(f"  {subject} took {time.perf_counter() - started:.0f} s", flush=True)
    return failed


def _verdict(row: Row) -> str:
    if row.reach is None:
        return ""
    is_reached = row.value >= row.reach if row.better == "higher" else row.value <= row.reach
    return f"  [{'reached' if is_reached else 'short of'} {row.reach:g}]"


def select(names: Sequence[str]) -> list[str]:
    """The subjects in the order in which they run, with the gate where one of them depends on it.

    Raises:
        typer.BadParameter: there is no such subject.
    """
    if unknown := set(names) - {_ALL, *SUBJECTS}:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: choose from {', '.join([_ALL, *SUBJECTS])}")
    if _ALL in names:
        return list(SUBJECTS)
    wanted = {*names} if set(names) <= _UNGATED else {*names, _GATE}
    return [subject for subject in SUBJECTS if subject in wanted]


def read_sizes(base: Sizes, changes: Sequence[str]) -> Sizes:
    """Sizes with some of them changed by `name=number`.

    Raises:
        typer.BadParameter: a change is not of this form, or there is no such size.
    """
    known = {field.name for field in fields(Sizes) if field.type is int}
    found: dict[str, int] = {}
    for change in changes:
        name, _, number = change.partition("=")
        if name not in known or not number.isdecimal():
            raise typer.BadParameter(f"{change}: give name=number, with a name from {', '.join(sorted(known))}")
        found[name] = int(number)
    # mypy cannot know that only fields of integers are changed.
    return replace(base, **found)  # type: ignore[arg-type]


class ResultWriter:
    """Writes subjects' rows into one file; with `is_fresh` nothing that was there before stays."""

    def __init__(self, path: Path, command: str, device: str, is_fresh: bool) -> None:
        self._path, self._command, self._device = path, command, device
        self._is_fresh = is_fresh

    def keep(self, subject: str, rows: Sequence[Row]) -> None:
        """Put a subject's rows in place of those that the file has of it."""
        if self._is_fresh:
            self._path.unlink(missing_ok=True)
            self._is_fresh = False
        merge_results(self._path, self._command, self._device, subject, rows)


def main(
    subjects: Annotated[list[str], typer.Argument(help="`all`, or any of: " + ", ".join(SUBJECTS))],
    out: Annotated[Path, typer.Option(help="The result file; a subject's rows replace those that it has of it.")],
    config: Annotated[Path, typer.Option(help="Directory with the config.json of a true shape.")] = _CONFIG,
    size: Annotated[list[str] | None, typer.Option(help="Another size, as `seam_window=32`; several times.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 1,
    tiny: Annotated[bool, typer.Option(help="A tiny model and tiny prompts, on a CPU.")] = False,
) -> None:
    """Measure the engine on one GPU, in `parallel` on two, with random weights of a true shape."""
    chosen, changes = select(subjects), size or []
    sizes = read_sizes(TINY if tiny else TRUE, changes)
    rig = Rig(_TINY_CONFIG if tiny else config, sizes, torch.device("cpu" if tiny else "cuda"), seed)
    if _ALL in subjects and not parallel.is_possible(rig.device):
        print(f"{_PARALLEL} is left out: it needs {parallel.RANKS} GPUs", flush=True)
        chosen.remove(_PARALLEL)
    device = "CPU" if tiny else torch.cuda.get_device_name()
    options = [f"--config {rig.config}", *(f"--size {change}" for change in changes), f"--seed {seed}"]
    command = f"python -m bench.gpu {' '.join([*subjects, *options])}"
    if run(rig, chosen, ResultWriter(out, command, device, _ALL in subjects).keep):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
