"""An engine's passes without its loop, and how exactness is judged."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from services.worker.engine.capture import CapturePass, capture_prime
from services.worker.engine.combine import CombinePass, CombineRows, Prompt
from services.worker.engine.combine_plan import CombinePart, CombinePlan
from services.worker.engine.context import CaptureProfile, EngineContext
from services.worker.engine.decode import DecodeLoop, RunningRequest
from services.worker.engine.limits import EngineLimits
from services.worker.engine.loop import Engine
from services.worker.engine.requests import GenerateRequest, PromptPart
from services.worker.engine.sampling import Likeliest, Sampler, SamplingOptions, find_likeliest
from services.worker.engine.states import PrefixState, SegmentState
from services.worker.engine.sweep import Sweep
from services.worker.mixers.batch import LinearPlane
from services.worker.mixers.share import Ranks
from services.worker.mixers.state import DeviceMemory
from services.worker.models.registry import load_checkpoint

__all__ = [
    "TOLERANCE",
    "Combined",
    "PassRig",
    "assert_close",
    "assert_far",
    "create_context",
    "dense_transition",
    "draw_ids",
    "finish",
    "poison",
    "relative_error",
]

TOLERANCE = 1e-4
Result = TypeVar("Result")


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value."""
    wide = expected.double().cpu()
    return float((actual.double().cpu() - wide).abs().max() / wide.abs().max())


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE, where: str = "") -> None:
    """Equal within a relative tolerance; NaN is never close."""
    error = relative_error(actual, expected)
    assert error <= tolerance, f"relative error {error:.2e} {where}".rstrip()


def assert_far(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    """A negative control: wrong by at least ten times what `assert_close` forgives."""
    error = relative_error(actual, expected)
    assert error >= 10 * tolerance, f"relative error {error:.2e} would hardly be seen"


def dense_transition(plane: LinearPlane) -> torch.Tensor:
    """A plane's transition as matrices `[H, K, K]`."""
    if plane.transition.shape[-1] > 1:
        return plane.transition
    return torch.diag_embed(plane.transition[..., 0].expand(plane.end_state.shape[:2]))


def draw_ids(count: int, seed: int, vocab_size: int = 211) -> tuple[int, ...]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocab_size, (count,), generator=generator).tolist())


def create_context(
    directory: Path,
    device: torch.device,
    profile: CaptureProfile,
    num_pages: int = 160,
    num_slots: int = 6,
    ranks: Ranks | None = None,
) -> EngineContext:
    """A loaded checkpoint, or a rank's share of it.

    Its memory is poisoned: whatever is read before it is written turns the result into NaN.
    """
    memory = DeviceMemory(device, torch.float32, num_pages, page_size=16, num_slots=num_slots, ranks=ranks)
    context = EngineContext.create(load_checkpoint(directory, memory), memory, profile, state_bytes=1 << 28)
    poison(context)
    return context


def poison(context: EngineContext) -> None:
    """NaN into every page and state slot."""
    with torch.inference_mode():
        for pool in context.memory.page_pools:
            pool.keys.fill_(float("nan"))
            pool.values.fill_(float("nan"))
        for slots in context.memory.linear_slots:
            slots.states.fill_(float("nan"))
            slots.tails.fill_(float("nan"))


def finish(steps: Generator[None, None, Result]) -> Result:
    """Run a resumable pass to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            result: Result = finished.value
            return result


@dataclass(frozen=True, slots=True)
class Combined:
    """A combined prompt: the last token's logits, the pass's snapshots, and the prompt, which the caller releases."""

    logits: torch.Tensor
    prompt: Prompt
    snapshots: dict[int, PrefixState]


class _Recorder(Sampler):
    """Forces given tokens and keeps the logits that they were drawn from."""

    def __init__(self, forced: Sequence[int]) -> None:
        super().__init__(SamplingOptions(max_tokens=len(forced)))
        self._forced = list(forced)
        self.logits: list[torch.Tensor] = []

    def draw(self, logits: torch.Tensor, likeliest: Likeliest) -> int:
        # A decoder's logits are valid until its next step.
        self.logits.append(logits.clone())
        return self._forced[len(self.logits) - 1]


class PassRig:
    """One model with its memory, driven pass by pass."""

    def __init__(self, context: EngineContext) -> None:
        self.context = context
        self._decode = DecodeLoop(context)
        with torch.inference_mode():
            self.prime = capture_prime(context)

    def start_engine(self, limits: EngineLimits) -> Engine:
        """An engine over the same memory, which captures a prime of its own; the rig's passes end here."""
        if self.prime is not None:
            self.context.pages.release(self.prime.pages)
            self.prime = None
        return Engine(self.context, limits)

    @torch.inference_mode()
    def capture(self, *segments: tuple[int, ...]) -> list[SegmentState]:
        """States of segments captured in one pass."""
        return finish(CapturePass(self.context, segments, self.prime).run())

    @torch.inference_mode()
    def combine(self, *parts: CombinePart, prefix: PrefixState | None = None, max_tokens: int = 32) -> Combined:
        """Combine a prompt and keep it."""
        running = CombinePass(self.context, CombinePlan(prefix, parts, max_tokens))
        return Combined(finish(running.run()), running.prompt, running.snapshots)

    @torch.inference_mode()
    def sweep(self, *passes: CombinePass) -> list[Combined]:
        """Combine reserved prompts side by side and keep them."""
        rows = CombineRows(self.context, passes)
        finish(Sweep(self.context, [rows]).run())
        return [Combined(own, one.prompt, one.snapshots) for own, one in zip(rows.finish(), passes, strict=True)]

    def logits(self, *parts: CombinePart, prefix: PrefixState | None = None) -> torch.Tensor:
        """The last token's logits of a prompt that is then released."""
        combined = self.combine(*parts, prefix=prefix, max_tokens=1)
        combined.prompt.release(self.context)
        return combined.logits

    @torch.inference_mode()
    def decode(self, combined: Combined, forced: Sequence[int]) -> torch.Tensor:
        """Logits `[n, vocabulary]` after each forced token but the last, by decode steps; the prompt is released."""
        recorder = _Recorder(forced)
        request = GenerateRequest("r", (PromptPart(()),), SamplingOptions(len(forced)), lambda event: None)
        running = RunningRequest(request, combined.prompt, recorder)
        running.accept(combined.logits, find_likeliest(combined.logits[None])[0])
        while not running.finished:
            self._decode.step([running])
        combined.prompt.release(self.context)
        return torch.stack(recorder.logits)

    def fingerprint(self, state: SegmentState) -> list[torch.Tensor]:
        """Copies of all that a segment state keeps: planes, then keys and values of the body in every attention layer."""
        kept = [
            tensor.clone()
            for plane in state.planes
            for tensor in (plane.transition, plane.end_state, plane.tail, plane.decay)
            if tensor.numel()
        ]
        for pool in self.context.memory.page_pools:
            for plane_pool in (pool.keys, pool.values):
                kept.append(plane_pool[list(state.pages)].flatten(0, 1)[: state.body_tokens].clone())
        return kept

    def assert_remembers(self, state: SegmentState) -> None:
        """The fixture's own guard: transitions that matter, or every test after it is blind."""
        between = [(plane.decay >= 0.05) & (plane.decay <= 0.95) for plane in state.planes]
        kept = [[round(decay, 4) for decay in plane.decay.tolist()] for plane in state.planes]
        forgets = f"over {state.body_tokens} tokens the heads of the linear layers keep {kept}, not 0.05 to 0.95"
        assert not between or any(bool(inside.any()) for inside in between), forgets
        for plane, inside in zip(state.planes, between, strict=True):
            # A number a head is a decay that the family fixes by head and layer, which no fixture can draw.
            assert bool(inside.all()) or plane.transition.shape[-2:] == (1, 1), forgets
            norms = torch.linalg.matrix_norm(dense_transition(plane), ord=2)
            assert int((norms > 0.1).sum()) * 2 >= norms.numel(), f"transitions vanish, of norms {norms.tolist()}"
            rounding = 1.001 if self.context.profile.encoding.is_exact else 1.05
            assert bool((norms <= plane.decay * rounding).all()), "the product of decays bounds the transition"
