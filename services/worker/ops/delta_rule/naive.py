"""The gated delta rule token by token: the truth that every faster form is tested against. Any float dtype."""

from collections.abc import Collection, Sequence

import torch

from services.worker.ops.delta_rule.types import DeltaInputs, ScanResult, WalkResult
from services.worker.ops.layout import Body, PartWalk

__all__ = ["scan", "step", "walk"]


def _step(columns: torch.Tensor, inputs: DeltaInputs, token: int, values: torch.Tensor) -> torch.Tensor:
    """One token on columns `[H, K, X]` with values `[H, X]`: decay first, then read, then write."""
    key = inputs.k[token]
    decayed = inputs.log_decay[token].exp()[:, None, None] * columns
    read = torch.einsum("hk,hkx->hx", key, decayed)
    written = inputs.beta[token][:, None] * (values - read)
    return decayed + key[:, :, None] * written[:, None, :]


def scan(
    inputs: DeltaInputs, cu_runs: Sequence[int], states: torch.Tensor, transitions: torch.Tensor | None
) -> ScanResult:
    """Independent runs, each from its own state `[R, H, K, V]` and, where given, transition `[R, H, K, K]`."""
    outputs = torch.empty_like(inputs.v)
    end_states = states.clone()
    end_transitions = None if transitions is None else transitions.clone()
    for run in range(len(cu_runs) - 1):
        for token in range(cu_runs[run], cu_runs[run + 1]):
            end_states[run] = _step(end_states[run], inputs, token, inputs.v[token])
            outputs[token] = torch.einsum("hk,hkv->hv", inputs.q[token], end_states[run])
            if end_transitions is not None:
                nothing = torch.zeros_like(inputs.k[token])
                end_transitions[run] = _step(end_transitions[run], inputs, token, nothing)
    return ScanResult(outputs, end_states, end_transitions)


def walk(
    inputs: DeltaInputs,
    parts: PartWalk,
    states: torch.Tensor,
    bodies: Sequence[Body | None],
    keep_after: Collection[int] = (),
) -> WalkResult:
    """Each request's state `[B, H, K, V]` over its parts: the live run, then the stored body where there is one."""
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


def step(inputs: DeltaInputs, states: torch.Tensor) -> WalkResult:
    """One token a request: inputs hold `B` tokens, states `[B, H, K, V]`."""
    requests = states.shape[0]
    result = scan(inputs, range(requests + 1), states, None)
    return WalkResult(result.outputs, result.states, {})
