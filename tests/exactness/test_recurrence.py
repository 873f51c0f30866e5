"""The recurrence alone, every form of the op, against token-by-token fp64: splits, orders, repetition, short runs."""

from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.ops.layout import Body, PartWalk, apply_transition
from services.worker.ops.recurrence import RecurrenceInputs, chunked, naive
from tests.exactness.reference import Maps, Rule, Tokens, body_maps, draw_tokens, run_tokens
from tests.exactness.rig import assert_close, assert_far, relative_error

HEADS, KEYS, VALUES = 4, 12, 7
FORMS = [naive, chunked]
TOLERANCE = 2e-5


@pytest.fixture(params=FORMS, ids=lambda form: form.__name__.rpartition(".")[2], scope="module")
def form(request: pytest.FixtureRequest) -> ModuleType:
    chosen: ModuleType = request.param
    return chosen


@pytest.fixture(params=Rule, ids=str, scope="module")
def rule(request: pytest.FixtureRequest) -> Rule:
    chosen: Rule = request.param
    return chosen


def _draw(count: int, seed: int, rule: Rule) -> Tokens:
    return draw_tokens(count, HEADS, KEYS, VALUES, seed, rule)


def _inputs(tokens: Tokens, device: torch.device) -> RecurrenceInputs:
    q, k, v, log_decay = (each.float().to(device) for each in (tokens.q, tokens.k, tokens.v, tokens.decay.log()))
    beta = None if tokens.beta is None else tokens.beta.float().to(device)
    return RecurrenceInputs(q, k, v, log_decay, beta)


def _stored(rule: Rule, maps: Maps, device: torch.device) -> Body:
    return Body(rule.compact(maps.transition).float().to(device), maps.end_state.float().to(device))


def _state(seed: int) -> torch.Tensor:
    return torch.randn(HEADS, KEYS, VALUES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _eye(rule: Rule, device: torch.device) -> torch.Tensor:
    return rule.compact(torch.eye(KEYS, device=device).expand(1, HEADS, KEYS, KEYS)).contiguous()


def _near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close(actual, expected, TOLERANCE)


@pytest.mark.parametrize("length", [2, 3, 17, 63, 64, 65, 128, 129, 193])
def test_transition_and_end_state(length: int, form: ModuleType, rule: Rule, device: torch.device) -> None:
    tokens = _draw(length, length, rule)
    maps, start = body_maps(tokens), _state(1)
    norms = torch.linalg.matrix_norm(maps.transition, ord=2)
    assert int((norms > 0.1).sum()) * 2 >= HEADS
    result = form.scan(_inputs(tokens, device), (0, length), start.float()[None].to(device), _eye(rule, device))
    ran = run_tokens(tokens, start)
    _near(result.outputs, ran.outputs)
    _near(result.states[0], ran.state)
    kept = rule.compact(maps.transition)
    _near(result.transitions[0], kept)
    _near(result.states[0].cpu() - apply_transition(result.transitions[0].cpu(), start.float()), maps.end_state)
    assert_far(result.transitions[0], torch.zeros_like(kept) + 1e-30, TOLERANCE)
    assert_far(result.states[0], maps.end_state, TOLERANCE)
    if rule.erases:
        assert_far(result.transitions[0], maps.transition.transpose(1, 2), TOLERANCE)
        assert_far(result.states[0], maps.transition.transpose(1, 2) @ start + maps.end_state, TOLERANCE)


@pytest.mark.parametrize("rule", [rule for rule in Rule if rule.erases], ids=str)
def test_memory_is_read_after_the_decay(form: ModuleType, rule: Rule, device: torch.device) -> None:
    """The control writes `S ← Diag(a) S + b k (v − kᵀ S)`, which reads before the decay."""
    tokens = _draw(64, 3, rule)
    start, state = _state(2), _state(2)
    for token in range(64):
        k, beta = tokens.k[token][:, :, None], tokens.written[token][:, None, None]
        read = k.transpose(1, 2) @ state
        decay = tokens.decay[token].reshape(HEADS, -1, 1)
        state = decay * state + beta * k @ (tokens.v[token][:, None, :] - read)
    result = form.scan(_inputs(tokens, device), (0, 64), start.float()[None].to(device), None)
    _near(result.states[0], run_tokens(tokens, start).state)
    assert_far(result.states[0], state, TOLERANCE)


def test_gates_restart_at_each_packed_run(form: ModuleType, rule: Rule, device: torch.device) -> None:
    """The control lets the first run's decay leak into the second one's start."""
    first, second = (_draw(length, length, rule) for length in (37, 90))
    packed = _inputs(Tokens.concatenate([first, second]), device)
    starts = torch.stack([_state(1), _state(2)])
    result = form.scan(packed, (0, 37, 127), starts.float().to(device), _eye(rule, device).repeat(2, 1, 1, 1))
    for run, tokens in enumerate((first, second)):
        _near(result.states[run], run_tokens(tokens, starts[run]).state)
        _near(result.transitions[run], rule.compact(body_maps(tokens).transition))
    leaked = first.decay.prod(0).reshape(HEADS, -1, 1) * starts[1]
    assert_far(result.states[1], run_tokens(second, leaked).state, TOLERANCE)


@pytest.mark.parametrize("seams", [(0, 5), (37, 0), (8, 90)], ids=str)
def test_capture_splits_seam_from_body(
    seams: tuple[int, int], form: ModuleType, rule: Rule, device: torch.device
) -> None:
    """The transition is the body's alone; a run that is all seam keeps what it was given."""
    runs = [_draw(length, length, rule) for length in (37, 90)]
    starts, given = torch.stack([_state(1), _state(2)]), _eye(rule, device).repeat(2, 1, 1, 1) * 0.5
    packed = _inputs(Tokens.concatenate(runs), device)
    result = form.capture(packed, (0, 37, 127), seams, starts.float().to(device), given)
    whole = form.scan(packed, (0, 37, 127), starts.float().to(device), None)
    _near(result.outputs, whole.outputs)
    for run, (tokens, seam) in enumerate(zip(runs, seams, strict=True)):
        transition = body_maps(tokens[seam:]).transition @ (0.5 * torch.eye(KEYS, dtype=torch.float64))
        _near(result.transitions[run], rule.compact(transition))
        _near(result.seam_states[run], run_tokens(tokens[:seam], starts[run]).state)
        _near(result.states[run], run_tokens(tokens, starts[run]).state)
        if 0 < seam < len(tokens):
            assert_far(result.transitions[run], rule.compact(body_maps(tokens).transition) * 0.5, TOLERANCE)


def test_runs_compose_in_order(form: ModuleType, rule: Rule, device: torch.device) -> None:
    """`T = T_B T_A`, `S = T_B S_A + S_B`, and neither the swapped product nor swapped runs."""
    a, b = _draw(40, 5, rule), _draw(29, 6, rule)
    maps_a, maps_b = body_maps(a), body_maps(b)
    both = _inputs(Tokens.concatenate([a, b]), device)
    zero = torch.zeros(1, HEADS, KEYS, VALUES, device=device)
    result = form.scan(both, (0, 69), zero, _eye(rule, device))
    _near(result.transitions[0], rule.compact(maps_b.transition @ maps_a.transition))
    _near(result.states[0], maps_b.transition @ maps_a.end_state + maps_b.end_state)
    if rule.erases:
        assert_far(result.transitions[0], maps_a.transition @ maps_b.transition, TOLERANCE)
    assert_far(result.states[0], maps_a.transition @ maps_b.end_state + maps_a.end_state, TOLERANCE)


def test_step_equals_a_run_of_one(form: ModuleType, rule: Rule, device: torch.device) -> None:
    tokens = _draw(3, 8, rule)
    starts = torch.stack([_state(seed) for seed in range(3)])
    slots = torch.tensor([2, 0, 3], device=device)
    states = torch.full((4, HEADS, KEYS, VALUES), 7.0, device=device)
    states[slots] = starts.float().to(device)
    outputs = form.step(_inputs(tokens, device), states, slots)
    for row, slot in enumerate(slots.tolist()):
        ran = run_tokens(tokens[row : row + 1], starts[row])
        _near(outputs[row], ran.outputs[0])
        _near(states[slot], ran.state)
    assert bool((states[1] == 7.0).all())


def test_a_long_run_stays_finite(form: ModuleType, rule: Rule, device: torch.device) -> None:
    """Strong writes and gates that forget at once must neither overflow nor divide by zero."""
    tokens = _draw(130, 9, rule)
    beta = None if tokens.beta is None else tokens.beta * 0 + 1
    harsh = Tokens(tokens.q, tokens.k, tokens.v, tokens.decay * 0 + 1e-30, beta)
    result = form.scan(_inputs(harsh, device), (0, 130), _state(1).float()[None].to(device), _eye(rule, device))
    _near(result.states[0], run_tokens(harsh, _state(1)).state)
    assert bool(result.outputs.isfinite().all())


@pytest.mark.parametrize("kept", [1e-9, 1e-87, 1e-300], ids=["little", "hardly", "nothing"])
def test_slow_gates_behind_one_that_forgets(kept: float, form: ModuleType, rule: Rule, device: torch.device) -> None:
    """Sums of log-gates from a chunk's start lose the slow ones in fp32; the control leaves the slow ones out."""
    tokens, start = _draw(130, 14, rule), _state(7)
    forgets = torch.rand(tokens.decay.shape, generator=torch.Generator().manual_seed(15)) < 0.08
    mixed = replace(tokens, decay=torch.where(forgets, kept, tokens.decay))
    result = form.scan(_inputs(mixed, device), (0, 130), start.float()[None].to(device), None)
    ran = run_tokens(mixed, start)
    _near(result.outputs, ran.outputs)
    _near(result.states[0], ran.state)
    lasting = replace(tokens, decay=torch.where(forgets, kept, torch.ones_like(tokens.decay)))
    assert_far(result.states[0], run_tokens(lasting, start).state, TOLERANCE)


@pytest.mark.parametrize("rule", [rule for rule in Rule if rule.every_channel], ids=str)
def test_channels_of_very_different_speed(form: ModuleType, rule: Rule, device: torch.device) -> None:
    """Rates from 1e-5 to 300, first each channel its own, then shuffled anew at every token."""
    tokens, start = _draw(130, 16, rule), _state(8)
    rates = torch.logspace(-5, 2.48, KEYS, dtype=torch.float64).expand_as(tokens.decay)
    orders = torch.rand(rates.shape, generator=torch.Generator().manual_seed(17)).argsort(-1)
    for each in (rates, rates.gather(-1, orders)):
        spread = replace(tokens, decay=(-each).exp())
        result = form.scan(_inputs(spread, device), (0, 130), start.float()[None].to(device), _eye(rule, device))
        ran = run_tokens(spread, start)
        _near(result.outputs, ran.outputs)
        _near(result.states[0], ran.state)
        assert bool(result.transitions.isfinite().all())
        turned = replace(spread, decay=spread.decay.flip(-1))
        assert_far(result.states[0], run_tokens(turned, start).state, TOLERANCE)


Cut = tuple[int, int]


@st.composite
def _prompts(draw: st.DrawFn) -> list[Cut]:
    """Parts as (live tokens, body tokens), at most 200 tokens in all; a body of 0 is no body."""
    cuts: list[Cut] = []
    left = draw(st.integers(1, 200))
    while left > 0 and len(cuts) < 8:
        live = draw(st.one_of(st.integers(0, 3), st.integers(0, 80)))
        body = draw(st.one_of(st.just(0), st.integers(1, 3), st.integers(1, 120)))
        cuts.append((min(live, left), min(body, left - min(live, left))))
        left -= max(1, sum(cuts[-1]))
    return cuts


@dataclass(frozen=True, slots=True)
class Chosen:
    """One request's segments in its own order, each cut into a live run and a body."""

    rule: Rule
    pieces: list[Tokens]
    cuts: list[Cut]

    @property
    def live(self) -> list[Tokens]:
        """The live runs."""
        return [piece[: cut[0]] for piece, cut in zip(self.pieces, self.cuts, strict=True)]

    def bodies(self, device: torch.device) -> list[Body | None]:
        """The stored bodies."""
        maps = [body_maps(piece[cut[0] :]) for piece, cut in zip(self.pieces, self.cuts, strict=True)]
        stored = [_stored(self.rule, each, device) for each in maps]
        return [body if cut[1] else None for body, cut in zip(stored, self.cuts, strict=True)]

    def live_rows(self) -> list[int]:
        """Where the live tokens stand in the whole sequence."""
        rows: list[int] = []
        offset = 0
        for live, body in self.cuts:
            rows.extend(range(offset, offset + live))
            offset += live + body
        return rows


@settings(max_examples=60)
@given(cuts=_prompts(), seed=st.integers(0, 1000), requests=st.integers(1, 3), order=st.randoms(use_true_random=False))
def test_any_split_order_and_repetition(
    form: ModuleType, rule: Rule, device: torch.device, cuts: list[Cut], seed: int, requests: int, order: Random
) -> None:
    """Live runs and stored bodies in any mixture give what the same tokens give in one run, for every request."""
    segments = [_draw(sum(cut), seed + index, rule) for index, cut in enumerate(cuts)]
    prompts = []
    for _ in range(requests):
        indices = order.choices(range(len(cuts)), k=order.randint(1, len(cuts)))
        prompts.append(Chosen(rule, [segments[index] for index in indices], [cuts[index] for index in indices]))
    live = [run for prompt in prompts for run in prompt.live]
    walk = PartWalk(
        (0, *accumulate(len(run) for run in live)), (0, *accumulate(len(prompt.cuts) for prompt in prompts))
    )
    starts = torch.stack([_state(seed + request) for request in range(requests)])
    lasts = [end - 1 for end in walk.cu_parts[1:]]
    bodies = [body for prompt in prompts for body in prompt.bodies(device)]
    packed = _inputs(Tokens.concatenate(live), device)
    result = form.walk(packed, walk, starts.float().to(device), bodies, lasts)
    offset = 0
    for request, prompt in enumerate(prompts):
        whole = run_tokens(Tokens.concatenate(prompt.pieces), starts[request])
        _near(result.states[request], whole.state)
        assert torch.equal(result.kept[lasts[request]], result.states[request])
        rows = prompt.live_rows()
        if rows:
            error = (result.outputs[offset : offset + len(rows)].double().cpu() - whole.outputs[rows]).abs()
            assert float(error.max()) <= TOLERANCE * float(whole.outputs.abs().max())
        offset += len(rows)


@pytest.mark.parametrize("mistake", ["zero", "transposed", "swapped", "twice"])
def test_walk_controls(mistake: str, form: ModuleType, rule: Rule, device: torch.device) -> None:
    """What the property test above compares would catch each of the classical mistakes."""
    if mistake == "transposed" and not rule.erases:
        pytest.skip("a diagonal is its own transpose")
    pieces = [_draw(48, seed, rule) for seed in (11, 12)]
    window = 8
    whole = run_tokens(Tokens.concatenate(pieces), _state(4)).state
    maps = [body_maps(piece[0 if mistake == "twice" else window :]) for piece in pieces]
    transitions = [each.transition for each in maps]
    if mistake == "zero":
        transitions = [0 * each for each in transitions]
    elif mistake == "transposed":
        transitions = [each.transpose(1, 2).contiguous() for each in transitions]
    elif mistake == "swapped":
        transitions.reverse()
    bodies = [
        _stored(rule, Maps(transition, each.end_state), device)
        for transition, each in zip(transitions, maps, strict=True)
    ]
    live = _inputs(Tokens.concatenate([piece[:window] for piece in pieces]), device)
    walk = PartWalk((0, window, 2 * window), (0, 2))
    result = form.walk(live, walk, _state(4).float()[None].to(device), bodies)
    assert_far(result.states[0], whole, TOLERANCE)


def test_a_forgetting_body_needs_no_transition(form: ModuleType, rule: Rule, device: torch.device) -> None:
    """A body without a transition leaves its end state, and the live run before it still answers."""
    live, end_state = _draw(5, 13, rule), _state(5)
    bodies = [Body(None, end_state.float().to(device))]
    walk = PartWalk((0, 5), (0, 1))
    result = form.walk(_inputs(live, device), walk, _state(6).float()[None].to(device), bodies)
    assert relative_error(result.states[0], end_state) < 1e-6
    _near(result.outputs, run_tokens(live, _state(6)).outputs)


def test_requests_of_one_walk_are_apart(form: ModuleType, rule: Rule, device: torch.device) -> None:
    """Two requests of different shapes in one call: neither sees the other's state, runs or bodies."""
    pieces = [_draw(length, length, rule) for length in (3, 70, 1)]
    maps = body_maps(_draw(30, 21, rule))
    body = _stored(rule, maps, device)
    walk = PartWalk((0, 3, 73, 74), (0, 1, 3))
    starts = torch.stack([_state(1), _state(2)])
    packed = _inputs(Tokens.concatenate(pieces), device)
    result = form.walk(packed, walk, starts.float().to(device), [None, body, None], (0, 1))
    first = run_tokens(pieces[0], starts[0]).state
    middle = maps.transition @ run_tokens(pieces[1], starts[1]).state + maps.end_state
    _near(result.states[0], first)
    _near(result.kept[0], first)
    _near(result.kept[1], middle)
    _near(result.states[1], run_tokens(pieces[2], middle).state)
