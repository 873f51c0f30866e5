"""The recurrence token by token: the truth that every faster form is tested against. Any float dtype."""

from collections.abc import Collection, Sequence

import torch

from services.worker.ops.layout import Body, PartWalk
from services.worker.ops.recurrence.types import CaptureResult, RecurrenceInputs, ScanResult, WalkResult, identities

__all__ = ["capture", "scan", "step", "walk"]


def _step(columns: torch.Tensor, inputs: RecurrenceInputs, token: int, values: torch.Tensor) -> torch.Tensor:
    """One token on columns `[H, K, X]` with values `[H, X]`: decay first, then read and erase, then write."""
    key, log_decay = inputs.k[token], inputs.log_decay[token]
    decay = log_decay.exp() if log_decay.ndim == 2 else log_decay.exp()[:, None]
    decayed = decay[:, :, None] * columns
    if inputs.beta is None:
        return decayed + key[:, :, None] * values[:, None, :]
    read = torch.einsum("hk,hkx->hx", key, decayed)
    written = inputs.beta[token][:, None] * (values - read)
    return decayed + key[:, :, None] * written[:, None, :]


def _step_transition(transition: torch.Tensor, inputs: RecurrenceInputs, token: int) -> torch.Tensor:
    """One token on a transition, which brings no value; without an erasure its form stays a number or a diagonal."""
    if inputs.beta is not None:
        return _step(transition, inputs, token, torch.zeros_like(inputs.k[token]))
    log_decay = inputs.log_decay[token]
    decay: torch.Tensor = log_decay.exp().reshape(log_decay.shape[0], -1, 1)
    return decay * transition


def scan(
    inputs: RecurrenceInputs, cu_runs: Sequence[int], states: torch.Tensor, transitions: torch.Tensor | None
) -> ScanResult:
    """Independent runs, each from its own state `[R, H, K, V]` and, where given, transition.

    Transitions are `[R, H, K, K]` of a delta rule, else `[R, H, 1, 1]`, or `[R, H, K, 1]` for decays of every channel.
    """
    inputs = inputs.spread()
    outputs = torch.empty_like(inputs.v)
    end_states = states.clone()
    end_transitions = None if transitions is None else transitions.clone()
    for run in range(len(cu_runs) - 1):
        for token in range(cu_runs[run], cu_runs[run + 1]):
            end_states[run] = _step(end_states[run], inputs, token, inputs.v[token])
            outputs[token] = torch.einsum("hk,hkv->hv", inputs.q[token], end_states[run])
            if end_transitions is not None:
                end_transitions[run] = _step_transition(end_transitions[run], inputs, token)
    return ScanResult(outputs, end_states, end_transitions)


def capture(
    inputs: RecurrenceInputs,
    cu_runs: Sequence[int],
    seam_tokens: Sequence[int],
    states: torch.Tensor,
    transitions: torch.Tensor | None,
) -> CaptureResult:
    """As `scan`, where the first `seam_tokens` of each run take no part in its transition; None: they begin with the identity."""
    inputs = inputs.spread()
    outputs = torch.empty_like(inputs.v)
    begun = identities(inputs, len(states)) if transitions is None else transitions
    seam_states, end_states, end_transitions = states.clone(), states.clone(), begun.clone()
    for run, seam in enumerate(seam_tokens):
        start, end = cu_runs[run], cu_runs[run + 1]
        before = scan(inputs[start : start + seam], (0, seam), states[run : run + 1], None)
        body = inputs[start + seam : end]
        behind = scan(body, (0, end - start - seam), before.states, begun[run : run + 1])
        outputs[start : start + seam], outputs[start + seam : end] = before.outputs, behind.outputs
        seam_states[run], end_states[run] = before.states[0], behind.states[0]
        if behind.transitions is not None:
            end_transitions[run] = behind.transitions[0]
    return CaptureResult(outputs, end_states, seam_states, end_transitions)


def walk(
    inputs: RecurrenceInputs,
    parts: PartWalk,
    states: torch.Tensor,
    bodies: Sequence[Body | None],
    keep_after: Collection[int] = (),
) -> WalkResult:
    """Each request's state `[B, H, K, V]` over its parts: the live run, then the stored body where there is one."""
    inputs = inputs.spread()
    outputs = torch.empty_like(inputs.v)
    end_states = states.clone()
    kept: dict[int, torch.Tensor] = {}
    for request in range(len(parts.cu_parts) - 1):
        state = states[request]
        for part in parts.parts_of(request):
            run = parts.run(part)
            result = scan(inputs[run], [0, run.stop - run.start], state[None], None)
            outputs[run], state = result.outputs, result.states[0]
            body = bodies[part]
            if body is not None:
                state = body.apply(state)
            if part in keep_after:
                kept[part] = state.clone()
        end_states[request] = state
    return WalkResult(outputs, end_states, kept)


def step(inputs: RecurrenceInputs, states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """One token a request: inputs hold `B` tokens; the states `[slots, H, K, V]` in slots `[B]` advance in place.

    Returns outputs `[B, H, V]`.
    """
    inputs = inputs.spread()
    result = scan(inputs, range(len(slots) + 1), states[slots], None)
    states[slots] = result.states
    return result.outputs
