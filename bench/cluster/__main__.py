"""`python -m bench.cluster`: scheduling and simulated clusters, into bench/results/cluster.json; and files of costs.

`h200` derives the shipped costs from bench/results/gpu.json; `demo` measures those of this machine with a checkpoint. The
other subjects give rows.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from bench.cluster.costs_file import write_costs
from bench.cluster.fetches import measure_fetches
from bench.cluster.h200 import derive_costs, foretold
from bench.cluster.policy import measure_policy
from bench.cluster.real import measure_real
from bench.cluster.simulated import H200, measure_fairness, measure_simulated
from bench.cluster.transfers import measure_transfers
from bench.cluster.worker_costs import Sizes, measure_costs
from bench.results import Row, cpu_device, merge_results, read_results
from services.simulator.costs import SHIPPED, read_costs

_ROOT = Path(__file__).resolve().parent.parent.parent
_RESULTS = _ROOT / "bench" / "results"
_DEMO = SHIPPED / "cpu-demo.toml"
_DEMO_CHECKPOINT = _ROOT / "models" / "demo"


def measure_foretold() -> Iterator[Row]:
    """How near the shipped costs come to figures that they were not made from."""
    for each in foretold(read_results(_RESULTS / "gpu.json"), read_costs(H200)):
        yield Row(f"by the costs over measured, {each.name}", each.by_costs / each.measured, "×")


_SUBJECTS: dict[str, Callable[[], Iterable[Row]]] = {
    "policy": measure_policy,
    "simulated": measure_simulated,
    "fairness": measure_fairness,
    "costs": measure_foretold,
    "transfers": lambda: measure_transfers(_DEMO_CHECKPOINT),
    "real": lambda: measure_real(_DEMO_CHECKPOINT, read_costs(_DEMO)),
}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "subjects", nargs="*", default=[], help=f"of {', '.join(_SUBJECTS)} (all without any); h200; demo"
    )
    parser.add_argument("--out", type=Path, default=_RESULTS / "cluster.json")
    parser.add_argument("--checkpoint", type=Path, default=_DEMO_CHECKPOINT, help="whose costs `demo` measures")
    parser.add_argument("--costs", type=Path, default=_DEMO, help="the file that `demo` writes")
    arguments = parser.parse_args()
    if unknown := set(arguments.subjects) - {*_SUBJECTS, "h200", "demo"}:
        parser.error(f"unknown subjects: {', '.join(sorted(unknown))}")
    command = " ".join(["python -m bench.cluster", *sys.argv[1:]])
    for subject in arguments.subjects or _SUBJECTS:
        if subject == "h200":
            write_costs(H200, derive_costs(read_results(_RESULTS / "gpu.json"), measure_fetches(arguments.checkpoint)))
        elif subject == "demo":
            way = measure_fetches(arguments.checkpoint)
            how = "processor seconds of one engine; ways are `Fetch` between two processes"
            source = f"{cpu_device()}, by `python -m bench.cluster demo`: {how}."
            write_costs(arguments.costs, measure_costs(arguments.checkpoint, Sizes(), way, source))
        else:
            _keep(arguments.out, command, subject, list(_SUBJECTS[subject]()))


def _keep(out: Path, command: str, subject: str, rows: list[Row]) -> None:
    merge_results(out, command, cpu_device(), subject, rows)
    for row in rows:
        print(f"{row.value:10.4g} {row.unit:4} {row.measure}", flush=True)


if __name__ == "__main__":
    main()
