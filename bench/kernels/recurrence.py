"""The recurrence of the gated delta rule: capture, walk and step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import torch
import torch.nn.functional as F

from bench.kernels.case import Case, Timed, draw
from services.worker.ops.layout import Body, PartWalk
from services.worker.ops.recurrence import (
    CaptureResult,
    RecurrenceInputs,
    ScanResult,
    SlotStates,
    WalkResult,
    chunked,
    naive,
)
from services.worker.ops.recurrence import triton as kernels

__all__ = ["small_cases", "true_cases"]

_CHUNK = 64
_FP32 = 4


@dataclass(frozen=True, slots=True)
class _Heads:
    """Value heads, key heads, channels of each, and what queries, keys and values come in."""

    count: int
    key_heads: int
    keys: int
    values: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Query, key, value, output and gates."""
        return (
            self.dtype.itemsize * 2 * (self.key_heads * self.keys + self.count * self.values) + 2 * _FP32 * self.count
        )

    @property
    def state_bytes(self) -> int:
        return _FP32 * self.count * self.keys * self.values

    @property
    def transition_bytes(self) -> int:
        return _FP32 * self.count * self.keys * self.keys

    @property
    def token_operations(self) -> int:
        """Products of one token in the chunked form, chunks of `_CHUNK` tokens."""
        inside = _CHUNK * (3 * self.keys + 2 * self.values)
        return 2 * self.count * (inside + 3 * self.keys * self.values)

    @property
    def output_tolerance(self) -> float:
        """Half dtypes round outputs; states stay fp32."""
        return 1e-4 if self.dtype == torch.float32 else 1e-2


_Results = tuple[torch.Tensor, list[torch.Tensor]]


def _cases(
    name: str, kernel: Callable[[], _Results], reference: Callable[[], _Results], heads: _Heads, timed: Timed
) -> Iterator[Case]:
    """Outputs, with the times, and states, each within what its dtype holds."""
    yield Case(name, lambda: kernel()[1], lambda: reference()[1], 2e-4)
    yield Case(name + ", outputs", lambda: [kernel()[0]], lambda: [reference()[0]], heads.output_tolerance, timed)


def _tokens(count: int, heads: _Heads, device: torch.device) -> RecurrenceInputs:
    """Decays whose product over the tokens stays of the order of a tenth."""
    drawn = draw(count, heads.key_heads, heads.keys, device=device)
    q, k = (F.normalize(drawn.roll(shift, 0), dim=-1).to(heads.dtype) for shift in (0, 7))
    gates = draw(count, heads.count, device=device).sigmoid()
    values = draw(count, heads.count, heads.values, device=device).to(heads.dtype)
    return RecurrenceInputs(q * heads.keys**-0.5, k, values, -gates * min(0.1, 4 / count), gates.roll(1, 0))


def _wide(inputs: RecurrenceInputs) -> RecurrenceInputs:
    return replace(inputs, q=inputs.q.float(), k=inputs.k.float(), v=inputs.v.float())


def _states(count: int, heads: _Heads, device: torch.device) -> torch.Tensor:
    return draw(count, heads.count, heads.keys, heads.values, device=device)


def _identity(count: int, heads: _Heads, device: torch.device) -> torch.Tensor:
    return torch.eye(heads.keys, device=device).repeat(count, heads.count, 1, 1)


def _scan(form: ModuleType, inputs: RecurrenceInputs, cu_runs: Sequence[int], states: torch.Tensor) -> _Results:
    result: ScanResult = form.scan(inputs, cu_runs, states, None)
    return result.outputs, [result.states]


def _capture(
    form: ModuleType,
    inputs: RecurrenceInputs,
    cu_runs: Sequence[int],
    seam: int,
    starts: tuple[torch.Tensor, torch.Tensor],
) -> _Results:
    result: CaptureResult = form.capture(inputs, cu_runs, [seam] * (len(cu_runs) - 1), *starts)
    return result.outputs, [result.states, result.seam_states, result.transitions]


def _capture_cases(runs: int, length: int, heads: _Heads, form: ModuleType, device: torch.device) -> Iterator[Case]:
    tokens, cu_runs = runs * length, range(0, (runs + 1) * length, length)
    inputs, states = _tokens(tokens, heads, device), _states(runs, heads, device)
    size = tokens * heads.token_bytes + 2 * runs * heads.state_bytes
    operations = float(tokens * heads.token_operations)
    yield from _cases(
        f"scan, {runs} x {length} tokens",
        lambda: _scan(kernels, inputs, cu_runs, states),
        lambda: _scan(form, _wide(inputs), cu_runs, states),
        heads,
        Timed(lambda: kernels.scan(inputs, cu_runs, states, None), size, operations),
    )
    seam, starts = min(32, length // 3), (states, _identity(runs, heads, device))
    yield from _cases(
        f"capture with transitions, {runs} x {length} tokens",
        lambda: _capture(kernels, inputs, cu_runs, seam, starts),
        lambda: _capture(form, _wide(inputs), cu_runs, seam, starts),
        heads,
        Timed(
            lambda: kernels.capture(inputs, cu_runs, [seam] * runs, *starts),
            size + 2 * runs * heads.transition_bytes,
            operations + 4.0 * tokens * heads.count * heads.keys * heads.keys,
        ),
    )


def _walk(
    form: ModuleType, inputs: RecurrenceInputs, parts: PartWalk, states: torch.Tensor, bodies: Sequence[Body | None]
) -> _Results:
    own = states.clone()
    result: WalkResult = form.walk(inputs, parts, _slots(own) if form is kernels else own, bodies, (1,))
    return result.outputs, [own if form is kernels else result.states, result.kept[1]]


def _slots(states: torch.Tensor) -> SlotStates:
    return SlotStates(states, torch.arange(len(states), device=states.device))


def _walk_cases(num_bodies: int, live: int, heads: _Heads, form: ModuleType, device: torch.device) -> Iterator[Case]:
    """One request; a last part of live tokens alone."""
    cu_runs = tuple(range(0, (num_bodies + 2) * live, live))
    parts, inputs = PartWalk(cu_runs, (0, num_bodies + 1)), _tokens(cu_runs[-1], heads, device)
    states, ends = _states(1, heads, device), _states(num_bodies, heads, device)
    running = _slots(states.clone())
    transitions = 0.7 * heads.keys**-0.5 * draw(num_bodies, heads.count, heads.keys, heads.keys, device=device)
    bodies = [*(Body(*pair) for pair in zip(transitions, ends, strict=True)), None]
    yield from _cases(
        f"walk, {num_bodies} bodies, {live} live tokens each",
        lambda: _walk(kernels, inputs, parts, states, bodies),
        lambda: _walk(form, _wide(inputs), parts, states, bodies),
        heads,
        Timed(
            lambda: kernels.walk(inputs, parts, running, bodies),
            num_bodies * (heads.transition_bytes + heads.state_bytes) + parts.num_tokens * heads.token_bytes,
            2.0 * num_bodies * heads.count * heads.keys**2 * heads.values + parts.num_tokens * heads.token_operations,
        ),
    )


def _step(form: ModuleType, inputs: RecurrenceInputs, states: torch.Tensor, slots: torch.Tensor) -> _Results:
    advanced = states.clone()
    outputs: torch.Tensor = form.step(inputs, advanced, slots)
    return outputs, [advanced]


def _step_cases(requests: int, heads: _Heads, form: ModuleType, device: torch.device) -> Iterator[Case]:
    inputs, states = _tokens(requests, heads, device), _states(requests + 1, heads, device)
    slots = torch.arange(requests, 0, -1, device=device)
    yield from _cases(
        f"step, {requests} requests",
        lambda: _step(kernels, inputs, states, slots),
        lambda: _step(form, _wide(inputs), states, slots),
        heads,
        Timed(
            lambda: kernels.step(inputs, states, slots),
            requests * (2 * heads.state_bytes + heads.token_bytes),
            6.0 * requests * heads.count * heads.keys * heads.values,
        ),
    )


def small_cases(device: torch.device) -> Iterator[Case]:
    """Against the naive form, on sizes that fill no tile."""
    heads = _Heads(4, 2, 40, 24, torch.float32)
    yield from _capture_cases(2, 70, heads, naive, device)
    yield from _walk_cases(2, 5, heads, naive, device)
    yield from _step_cases(3, heads, naive, device)


def true_cases(device: torch.device) -> Iterator[Case]:
    """Against the chunked form in fp32."""
    heads = _Heads(32, 16, 128, 128, torch.bfloat16)
    yield from _capture_cases(16, 2048, heads, chunked, device)
    for num_bodies in (16, 64):
        yield from _walk_cases(num_bodies, 32, heads, chunked, device)
    for requests in (1, 64):
        yield from _step_cases(requests, heads, chunked, device)
