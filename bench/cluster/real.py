"""A cold request on real workers of one thread each, beside what the simulator foretells with the costs of this machine.

What a machine with fewer cores than workers shows by the clock is its cores. The busiest worker's processor seconds are the
critical path that enough cores would leave: the simulator's first token is compared with them.
"""

import asyncio
import json
import os
import random
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.results import Row
from services.cache.traces import TracePart, TraceRequest
from services.cli.supervisor import BOTH_ROLES, Stack, StackOptions
from services.simulator.cluster import Setting, simulate
from services.simulator.costs import Costs
from services.simulator.workload import read_arrivals

__all__ = ["measure_real"]

_WORKERS = (1, 2, 4)
# A sixteenth of the eight segments of the simulated request, in words; a word is about a token.
_WORDS_OF_SEGMENTS = (384, 320, 320, 256, 256, 192, 192, 128)
_WORDS = "river stone market winter ship road bridge harbour island north under council tower after before".split()
_WARM_UP, _ROUNDS = 2, 5
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class _Measured:
    """One request. tokens: of its segments, and of the rest; processor_seconds: of each worker."""

    first_token_seconds: float
    segment_tokens: tuple[int, ...]
    other_tokens: int
    processor_seconds: tuple[float, ...]


def measure_real(checkpoint: Path, costs: Costs) -> Iterator[Row]:
    """Stacks of 1, 2 and 4 workers take turns with the same new documents.

    Raises:
        StackStartError: one of them did not come up.
    """
    found = asyncio.run(_measure(checkpoint))
    clock = {count: median(one.first_token_seconds for one in own) for count, own in found.items()}
    busiest = {count: median(max(one.processor_seconds) for one in own) for count, own in found.items()}
    simulated = {count: _simulate(found[1][0], costs, count) for count in found}
    name = f"cold request of {len(_WORDS_OF_SEGMENTS)} segments"
    for count in _WORKERS[1:]:
        yield Row(f"time to first token, one worker over {count}, {name}, by the clock", clock[1] / clock[count], "×")
        measure = f"busiest worker's processor seconds, one worker over {count}, {name}"
        yield Row(measure, busiest[1] / busiest[count], "×")
        yield Row(f"the same, simulated, {count} workers, {name}", simulated[1] / simulated[count], "×")
    for count in _WORKERS:
        workers = f"{count} worker{'s' * (count > 1)}"
        yield Row(f"busiest worker's processor seconds over the simulated first token, {workers}, {name}",
                  busiest[count] / simulated[count], "×")  # fmt: skip
        total = median(sum(one.processor_seconds) for one in found[count])
        yield Row(f"processor seconds of all workers over those of one alone, {workers}, {name}",
                  total / median(sum(one.processor_seconds) for one in found[1]), "×", better="lower")  # fmt: skip


async def _measure(checkpoint: Path) -> dict[int, list[_Measured]]:
    found: defaultdict[int, list[_Measured]] = defaultdict(list)
    async with AsyncExitStack() as closing:
        stacks: dict[int, Stack] = {}
        for count in _WORKERS:
            stack = Stack(_options(checkpoint, count))
            await stack.start()
            closing.push_async_callback(stack.stop)
            stacks[count] = stack
        for number in range(_WARM_UP + _ROUNDS):
            for count, stack in stacks.items():
                measured = await asyncio.to_thread(_ask, stack, number, count)
                if number >= _WARM_UP:
                    found[count].append(measured)
    return found


def _options(checkpoint: Path, count: int) -> StackOptions:
    variables = {"HYPIC_WORKER_TORCH_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return StackOptions(checkpoint, port=0, log_level="error", variables=variables, roles=(BOTH_ROLES,) * count)


def _ask(stack: Stack, number: int, count: int) -> _Measured:
    pids = [stack.pid(f"worker-{index}") for index in range(count)]
    before = [_processor_seconds(pid) for pid in pids]
    answer = _request(stack, _body(stack, number))
    used = tuple(_processor_seconds(pid) - began for pid, began in zip(pids, before, strict=True))
    parts = answer["hypic"]["parts"]
    segments = [part for part in parts if part["kind"] == "segment"]
    if any(part["served"] != "cold" for part in segments):
        raise RuntimeError(f"segments were served {[part['served'] for part in segments]}, which were to be cold")
    return _Measured(
        answer["hypic"]["seconds"]["time_to_first_token"],
        tuple(part["tokens"] for part in segments),
        sum(part["tokens"] for part in parts if part["kind"] != "segment"),
        used,
    )


def _body(stack: Stack, number: int) -> bytes:
    source = random.Random(number)
    texts = [" ".join(source.choice(_WORDS) for _ in range(words)) for words in _WORDS_OF_SEGMENTS]
    body = {
        "model": stack.model_name,
        "temperature": 0,
        "max_tokens": 1,
        "documents": [{"title": f"{number}-{index}", "text": text} for index, text in enumerate(texts)],
        "messages": [{"role": "user", "content": f"What lies north of the harbour? ({number})"}],
        "hypic": {"explain": True},
    }
    return json.dumps(body).encode()


def _request(stack: Stack, body: bytes) -> Any:  # noqa: ANN401 # JSON
    request = urllib.request.Request(
        f"{stack.base_url}/v1/chat/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def _processor_seconds(pid: int) -> float:
    """Of a process and its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def _simulate(measured: _Measured, costs: Costs, num_workers: int) -> float:
    """The first token of the same request on idle virtual workers."""
    segments: Sequence[TracePart] = [
        TracePart(str(index), tokens) for index, tokens in enumerate(measured.segment_tokens)
    ]
    request = TraceRequest(0.0, "", (*segments, TracePart("", measured.other_tokens)))
    return simulate(read_arrivals([request], costs, 1.0), costs, Setting(num_workers)).served[0].first_token_seconds
