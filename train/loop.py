"""Trains the demo model by the clock, scores it and exports it.

python -m train.loop --out OUT --seconds 500
"""

import time

_STARTED = time.monotonic()

import argparse  # noqa: E402  (the clock starts before the slow imports)
import json  # noqa: E402
from collections import deque  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

from train.data import questions  # noqa: E402
from train.data.prompts import PromptEncoder  # noqa: E402
from train.data.rows import ROW_LENGTHS  # noqa: E402
from train.export import cut_weights, export  # noqa: E402
from train.loader import Batch, Loader  # noqa: E402
from train.network import Network  # noqa: E402
from train.optimiser import Optimiser  # noqa: E402
from train.scoring import Encoded, encode_questions, exact_match  # noqa: E402
from train.shape import ModelShape, new_weights  # noqa: E402

_EVALUATION_SEED = 101
_WARM_UP_STEPS = 150
_DECAY_FROM = 0.45
_REPLY_SHARE = 0.7
_RETRIEVES_UNDER = 1.1
_HARDER_FROM_AT_LATEST = 0.3
_HARDER_OVER = 0.2


@dataclass(frozen=True, slots=True)
class Run:
    """One training run's settings; times count from the process's start."""

    out: Path
    tokenizer_file: Path
    seconds: float
    tokens: int
    workers: int
    seed: int
    muon_rate: float
    adam_rate: float
    score_seconds: float
    questions: int
    compiled: bool
    pieces: bool


def elapsed() -> float:
    """Seconds since the process started."""
    return time.monotonic() - _STARTED


class Stepper:
    """One optimiser step a batch; on a GPU one captured graph for each row length."""

    def __init__(self, network: Network, optimiser: Optimiser, tokens: int) -> None:
        self._network, self._optimiser, self._tokens = network, optimiser, tokens
        device = network.weights["embed"].device
        self._device = device
        self._ids = torch.zeros(tokens, dtype=torch.long, device=device)
        self._is_reply = torch.zeros(tokens, dtype=torch.bool, device=device)
        self._losses = torch.zeros(2, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._events: deque[torch.cuda.Event] = deque()

    def step(self, batch: Batch) -> None:
        """Updates the weights from one batch."""
        ids = torch.from_numpy(batch.ids.astype("int64"))
        is_reply = torch.from_numpy(batch.is_reply.astype("bool"))
        if self._device.type != "cuda":
            self._ids.copy_(ids)
            self._is_reply.copy_(is_reply)
            self._update(batch.row_length)
            return
        self._ids.copy_(ids.pin_memory(), non_blocking=True)
        self._is_reply.copy_(is_reply.pin_memory(), non_blocking=True)
        if batch.row_length in self._graphs:
            self._graphs[batch.row_length].replay()
        else:
            self._capture(batch.row_length)
        self._keep_pace()

    def _keep_pace(self) -> None:
        """Lets the host run one step ahead of the device, so that the clock means something."""
        self._events.append(torch.cuda.Event())
        self._events[-1].record()
        if len(self._events) > 2:
            self._events.popleft().synchronize()

    def losses(self) -> list[float]:
        """Mean loss of the last batch's reply tokens and of its other tokens."""
        return [round(x, 4) for x in self._losses.tolist()]

    def _capture(self, length: int) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._update(length)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        pool = next((g.pool() for g in self._graphs.values()), None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._update(length)
        self._optimiser.forget_gradients()
        self._graphs[length] = graph

    def _update(self, length: int) -> None:
        position = torch.arange(self._tokens, device=self._device) % length
        inside = position != length - 1
        losses = self._network.losses(self._ids, self._ids.roll(-1), position, self._tokens // length)
        is_reply = (self._is_reply.roll(-1) & inside).float()
        is_other = inside.float() - is_reply
        reply = (losses * is_reply).sum() / is_reply.sum().clamp(min=1)
        other = (losses * is_other).sum() / is_other.sum()
        self._optimiser.forget_gradients()
        (_REPLY_SHARE * reply + (1 - _REPLY_SHARE) * other).backward()
        self._optimiser.step()
        self._losses.copy_(torch.stack([reply.detach(), other.detach()]))


def learning_rate_factor(step: int, progress: float) -> float:
    """Warm-up by steps, then constant, then linear to zero by the clock."""
    warm = min(1.0, (step + 1) / _WARM_UP_STEPS)
    decay = min(1.0, (1 - progress) / (1 - _DECAY_FROM))
    return max(0.0, min(warm, decay))


class Curriculum:
    """Keeps rows easy until replies are retrieved, then makes them harder by the clock."""

    def __init__(self) -> None:
        self._from = _HARDER_FROM_AT_LATEST

    def observe(self, progress: float, reply_loss: float) -> None:
        """Notes the reply loss at a point of the run."""
        if reply_loss < _RETRIEVES_UNDER:
            self._from = min(self._from, progress)

    def difficulty(self, progress: float) -> float:
        """From 0 (easy) to 1 (the final mix)."""
        return min(1.0, max(0.0, (progress - self._from) / _HARDER_OVER))


def _train(run: Run, stepper: Stepper, optimiser: Optimiser, loader: Loader, score: Any) -> list[dict[str, Any]]:
    curve: list[dict[str, Any]] = []
    step, begun, steady = 0, elapsed(), (0, 0.0)
    next_score, next_print, curriculum = begun + run.score_seconds, 0.0, Curriculum()
    while (now := elapsed()) < run.seconds:
        progress = (now - begun) / (run.seconds - begun)
        loader.set_difficulty(curriculum.difficulty(progress))
        optimiser.set_rate(learning_rate_factor(step, progress))
        stepper.step(loader.next())
        step += 1
        if step == len(ROW_LENGTHS) + 20:
            steady = (step, elapsed())
        if step % 20 == 0:
            curriculum.observe(progress, stepper.losses()[0])
        if step % 20 == 0 and (now := elapsed()) > next_print:
            next_print = now + 6
            losses = stepper.losses()
            rate = (step - steady[0]) * run.tokens / max(1e-9, elapsed() - steady[1])
            level = curriculum.difficulty(progress)
            print(f"{now:6.1f}s step {step} {losses} {rate:.0f} tok/s {level:.2f}", flush=True)
        if now > next_score:
            point = {"seconds": round(now), "step": step, "losses": stepper.losses(), **score()}
            curve.append(point)
            print(json.dumps(point), flush=True)
            next_score = elapsed() + run.score_seconds
    curve.append({"seconds": round(elapsed()), "step": step, "losses": stepper.losses()})
    return curve


def _encode(run: Run, count: int, seed: int, *, long_documents: bool) -> list[Encoded]:
    asked = list(questions(seed, count, long_documents=long_documents))
    return encode_questions(run.tokenizer_file, asked)


def train(run: Run) -> None:
    """Trains, exports, scores, in this order, and writes `report.json` along the way."""
    loader = Loader(run.tokenizer_file, run.tokens, run.workers, run.seed)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.set_float32_matmul_precision("high")
    shape = ModelShape()
    weights = new_weights(shape, run.seed, device)
    network = Network(shape, weights, torch.bfloat16, compiled=run.compiled)
    optimiser = Optimiser(weights, run.muon_rate, run.adam_rate)
    stepper = Stepper(network, optimiser, run.tokens)
    probe = _encode(run, min(480, run.questions), _EVALUATION_SEED, long_documents=False)
    curve = _train(run, stepper, optimiser, loader, lambda: exact_match(network, probe, run.tokens))
    loader.stop()
    encoder = PromptEncoder(run.tokenizer_file)
    export(run.out, shape, weights, encoder.end_of_text, encoder.message_end)
    if run.pieces:
        cut_weights(run.out)
    with torch.no_grad():
        for weight in weights.values():
            weight.copy_(weight.bfloat16())
    report: dict[str, Any] = {
        "parameters": sum(w.numel() for w in weights.values()),
        "tokens": curve[-1]["step"] * run.tokens,
        "seed": run.seed,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "curve": curve,
    }
    for name, long_documents in (("standard", False), ("long", True)):
        count = run.questions // (4 if long_documents else 1)
        asked = _encode(run, count, _EVALUATION_SEED + 1, long_documents=long_documents)
        report[name] = {"questions": len(asked), **exact_match(network, asked, run.tokens)}
        report["seconds"] = round(elapsed())
        (run.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        print(name, json.dumps(report[name]), f"{elapsed():.0f}s", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer-file", type=Path, default="models/demo/tokenizer.json")
    parser.add_argument("--seconds", type=float, default=500.0, help="when training ends")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens a step")
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=0.002)
    parser.add_argument("--score-seconds", type=float, default=60.0)
    parser.add_argument("--questions", type=int, default=3200)
    parser.add_argument("--no-compile", dest="compiled", action="store_false")
    parser.add_argument("--pieces", action="store_true", help="cut the weights file")
    train(Run(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
