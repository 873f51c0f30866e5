"""`python -m bench.vllm [answers] [ttft] --out FILE`: vLLM behind the router; `HYPIC_VLLM_PYTHON` names its interpreter."""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.results import Row, cpu_device, merge_results
from bench.vllm.answers import answer_rows, ask_all
from bench.vllm.first_token import first_token_rows
from bench.vllm.server import VARIABLE, find_python
from bench.vllm.stack import Pair, serve_pair


def main() -> None:
    """Measure, print, and write where asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.vllm", description=__doc__)
    parser.add_argument("subjects", nargs="*", choices=["answers", "ttft"], default=["answers", "ttft"])
    parser.add_argument("--out", type=Path, help="result file; without it rows are printed only")
    parser.add_argument("--scenes", type=int, default=200, help="questions, each with documents of its own")
    parser.add_argument("--orders", type=int, default=2, help="orders of each question's documents")
    parser.add_argument("--rounds", type=int, default=9, help="of times to first token")
    arguments = parser.parse_args()
    python = find_python()
    if python is None:
        sys.exit(f"{VARIABLE} must name the interpreter of an environment with vLLM; see `make test-vllm`")

    def answers(pair: Pair) -> Iterator[Row]:
        found = ask_all(pair, arguments.scenes, arguments.orders)
        for line in found.differing:
            print(line)
        return answer_rows(found)

    measures: dict[str, Callable[[Pair], Iterator[Row]]] = {
        "answers": answers,
        "ttft": lambda pair: first_token_rows(pair, arguments.rounds),
    }
    with serve_pair(python) as pair:
        for subject in arguments.subjects:
            rows = list(measures[subject](pair))
            for row in rows:
                print(f"{row.value:10.4g} {row.unit:5} {subject}: {row.measure}", flush=True)
            if arguments.out:
                command = " ".join(["python -m bench.vllm", *sys.argv[1:]])
                merge_results(arguments.out, command, cpu_device(), subject, rows)


if __name__ == "__main__":
    main()
