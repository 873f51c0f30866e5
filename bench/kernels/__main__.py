"""`python -m bench.kernels --out FILE` on a machine with one GPU: checks, then times, each kernel.

Needs torch, triton, numpy and typer. With `--tiny` the small checks alone, which Triton's interpreter can run without a GPU.
"""

import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.ceilings import Ceilings, median_seconds
from bench.kernels import attention, experts, recurrence, rows
from bench.kernels.case import Case, Timed
from bench.results import Row, write_results

_GROUPS = (recurrence, attention, experts, rows)


def check(case: Case) -> list[Row]:
    """The error as a row, none where the kernel could not run; prints it, and FAILED where it is not within bounds."""
    try:
        error = case.error()
    except Exception as failure:  # whatever one kernel dies of, the others are still to be measured
        first = (str(failure).strip().splitlines() or [""])[0]
        print(f"  FAILED  {case.name}: {type(failure).__name__}: {first}", flush=True)
        return []
    right = error <= case.tolerance
    print(f"  {'ok    ' if right else 'FAILED'}  {error:8.1e}  {case.name}", flush=True)
    return [Row(f"relative error, {case.name}", error, "", better="lower")] if right else []


def measure(name: str, timed: Timed, ceilings: Ceilings, device: torch.device) -> list[Row]:
    """Time and rate as rows; prints them beside the ceiling that is nearer."""
    seconds = median_seconds(timed.call, device)
    moved, computed = timed.num_bytes / seconds, timed.operations / seconds
    shares = (moved / ceilings.copied, computed / ceilings.multiplied)
    print(
        f"{1e6 * seconds:11.1f} µs {1e-9 * moved:9.0f} GB/s {1e-12 * computed:8.1f} TFLOP/s "
        f"{100 * max(shares):5.0f} % of {'copy' if shares[0] >= shares[1] else 'bf16'}  {name}",
        flush=True,
    )
    rate = Row(name, 1e-9 * moved, "GB/s") if shares[0] >= shares[1] else Row(name, 1e-12 * computed, "TFLOP/s")
    return [Row(name, 1e6 * seconds, "µs", better="lower"), rate]


def run_small(device: torch.device) -> Iterator[list[Row]]:
    """Every small check; an empty list for each that failed."""
    print("small sizes, against the naive form")
    for case in chain.from_iterable(group.small_cases(device) for group in _GROUPS):
        yield check(case)


def run_true(device: torch.device, ceilings: Ceilings) -> Iterator[list[Row]]:
    """Every check at true shapes with its time; an empty list for each that failed."""
    print("true shapes, against the chunked form in fp32")
    for case in chain.from_iterable(group.true_cases(device) for group in _GROUPS):
        found = check(case)
        if found and case.timed is not None:
            found += measure(case.name, case.timed, ceilings, device)
        yield found


def main(
    out: Annotated[Path | None, typer.Option(help="Where to write the result file.")] = None,
    tiny: Annotated[bool, typer.Option(help="The small checks alone, without times.")] = False,
) -> None:
    """Check and time the kernels; exits with 1 where a check failed."""
    if "TRITON_INTERPRET" in os.environ:
        from tests.kernels.interpreter import adapt_interpreter

        adapt_interpreter()
    device = torch.device("cpu" if "TRITON_INTERPRET" in os.environ else "cuda")
    found: list[list[Row]] = list(run_small(device))
    if not tiny:
        ceilings = Ceilings.measure(device)
        print(f"ceilings: copy {1e-9 * ceilings.copied:.0f} GB/s, bf16 {1e-12 * ceilings.multiplied:.0f} TFLOP/s")
        found += [
            [Row("a large copy", 1e-9 * ceilings.copied, "GB/s")],
            [Row("a large bf16 product", 1e-12 * ceilings.multiplied, "TFLOP/s")],
        ]
        found += run_true(device, ceilings)
        if out is not None:
            _write(out, chain.from_iterable(found))
    if not all(found):
        raise typer.Exit(1)


def _write(path: Path, measured: Iterable[Row]) -> None:
    write_results(path, "python -m bench.kernels", torch.cuda.get_device_name(), measured)


if __name__ == "__main__":
    typer.run(main)
