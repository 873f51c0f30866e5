"""`make bench`: the CPU stack on the demo model."""

import asyncio
import os
import platform
from pathlib import Path

from rich.console import Console

from bench.in_process import PROMPT_TOKENS, EngineTimes, measure_engine
from bench.oracle import measure_transformers
from bench.over_http import HttpTimes, measure_http
from bench.results import Row, write_results
from services.cli.supervisor import Stack, StackOptions

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "models" / "demo"
TARGET = ROOT / "bench" / "results" / "cpu.json"


async def measure_stack() -> HttpTimes:
    """Start the stack on a free port, measure, stop it."""
    stack = Stack(StackOptions(CHECKPOINT, port=0, log_level="warning"))
    await stack.start()
    try:
        return await asyncio.to_thread(measure_http, stack)
    finally:
        await stack.stop()


def rows_of(http: HttpTimes, engine: EngineTimes, transformers: float) -> list[Row]:
    """Figures as ratios first, then what they are made of."""
    eight = f"8 documents, {http.prompt_tokens} prompt tokens"
    return [
        Row(f"time to first token, off over all hits, through HTTP ({eight})", http.off / http.all_hits, "×", 6.0),
        Row("time to first token, off over all hits, in process", engine.off / engine.all_hits, "×", 6.0),
        Row("time to first token, off over cold, through HTTP", http.off / http.cold, "×"),
        Row("time to first token, exact prefix cache over all hits, through HTTP", http.exact / http.all_hits, "×"),
        Row("full recompute in process, `transformers` over ours (`off`)", transformers / engine.off, "×"),
        Row("time to first token, all hits, through HTTP", http.all_hits, "s", better="lower"),
        Row("time to first token, exact prefix cache, through HTTP", http.exact, "s", better="lower"),
        Row("time to first token, off, through HTTP", http.off, "s", better="lower"),
        Row("time to first token, cold, through HTTP", http.cold, "s", better="lower"),
        Row("live tokens of an all-hit prompt", 100 * http.live_share, "%", better="lower"),
        Row("time to first token, all hits, in process", engine.all_hits, "s", better="lower"),
        Row("time to first token, off, in process", engine.off, "s", better="lower"),
        Row("capture of one 400-token segment, in process", engine.capture, "s", better="lower"),
        Row("decoding behind 3,200 composed tokens, batch 1, in process", engine.decode_rate, "tokens/s"),
        Row("bytes of one 400-token segment state", engine.segment_bytes / 2**20, "MiB", better="lower"),
    ]


def main() -> None:
    """Measure and write bench/results/cpu.json."""
    console = Console()
    with console.status("through HTTP …"):
        http = asyncio.run(measure_stack())
    with console.status("in process …"):
        engine = measure_engine(CHECKPOINT)
    with console.status("full recompute by transformers …"):
        transformers = measure_transformers(CHECKPOINT, PROMPT_TOKENS)
    device = f"CPU, {os.cpu_count()} cores, {platform.machine()}, one torch thread a process"
    result = write_results(TARGET, "make bench", device, rows_of(http, engine, transformers))
    for row in result.rows:
        console.print(f"{row.value:10.4g} {row.unit:9} {row.measure}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
