"""`python -m bench.fuzz`: generated requests against the whole stack on the demo model.

An eighth is made by schemathesis from the OpenAPI document, the rest are valid requests with something changed. Before and
after, one question over a document must get the same answer, from the same processes, which then hold no more than before.
"""

import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.fuzz.senders import send_generated, send_mutated
from bench.fuzz.tally import Tally
from bench.results import Row, cpu_device, merge_results
from tests.e2e.stack.asking import ask, document
from tests.e2e.stack.served import ServedStack

_ROOT = Path(__file__).resolve().parent.parent.parent
# Replies are short. What else the machine does must not pass for a cache service that is gone.
_VARIABLES = {"HYPIC_ROUTER_DEFAULT_MAX_TOKENS": "16", "HYPIC_ROUTER_CACHE_TIMEOUT_SECONDS": "20"}


def fuzz(stack: ServedStack, count: int, seed_number: int) -> Tally:
    """Send so many requests; whatever is wrong with the stack behind them counts as a fault too."""
    tally = Tally()
    asked = [document("before and after")]
    expected, pids = ask(stack, asked).text, stack.pids()
    generated = count // 8
    send_mutated(stack.base_url, stack.model, count - generated, seed_number, tally)
    while (missing := count - sum(tally.statuses.values()) - tally.faults["hang"]) > 0:
        send_generated(stack.base_url, stack.model, missing, seed_number, tally)
        seed_number += 1
    stack.wait_idle()
    if ask(stack, asked).text != expected:
        tally.add_fault("other answer", "the question asked before and after")
    if stack.pids() != pids:
        tally.add_fault("restart", "a service is another process than before")
    return tally


def main(
    requests: Annotated[int, typer.Option(help="How many.")] = 10_000,
    seed: Annotated[int, typer.Option(help="The same seed makes the same requests.")] = 1,
    out: Annotated[Path, typer.Option(help="File of the results.")] = _ROOT / "bench" / "results" / "router.json",
) -> None:
    """Send, count, write the subject `fuzz` of the file."""
    console = Console()
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as directory,
        ServedStack(_ROOT / "models" / "demo", log := Path(directory) / "log", _VARIABLES) as stack,
        console.status(f"{requests} requests …"),
    ):
        tally = fuzz(stack, requests, seed)
        failed = [line for line in log.read_text().splitlines() if "request_failed" in line]
    changed = tally.faults["other answer"] + tally.faults["restart"]
    rows = [*tally.rows(), Row("faults of the stack behind them", changed, "faults", 0, "lower")]
    command = f"python -m bench.fuzz --requests {requests} --seed {seed}"
    merge_results(out, command, cpu_device(), "fuzz", rows)
    for kind, examples in tally.examples.items():
        for example in examples:
            console.print(f"{kind}: {example}", highlight=False, markup=False)
    for line in failed:
        console.print(line, highlight=False, markup=False)
    for row in rows:
        console.print(f"{row.value:10.4g} {row.unit:9} {row.measure}", highlight=False)
    console.print(f"{dict(sorted(tally.statuses.items()))} in {time.monotonic() - started:.0f} s", highlight=False)
    raise typer.Exit(1 if tally.faults.total() else 0)


if __name__ == "__main__":
    typer.run(main)
