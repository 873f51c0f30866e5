"""The recurrence's kernels against its naive form, for every rule, on sizes that fill no tile."""

import pytest
import torch

from services.worker.ops.layout import Body, PartWalk, WalkRoom
from services.worker.ops.recurrence import RecurrenceInputs, SlotStates, naive
from services.worker.ops.recurrence import triton as kernels
from services.worker.ops.recurrence.triton_carry import locate
from tests.exactness.reference import Rule, draw_tokens
from tests.exactness.rig import assert_close, assert_far

TOLERANCE = 2e-5
# Heads, key channels, value channels: narrower than a tile, over its edge, and a state of two tiles.
SHAPES = [(2, 12, 7), (1, 40, 72), (1, 72, 20)]


@pytest.fixture(params=Rule, ids=str)
def rule(request: pytest.FixtureRequest) -> Rule:
    chosen: Rule = request.param
    return chosen


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> tuple[int, int, int]:
    chosen: tuple[int, int, int] = request.param
    return chosen


def _inputs(count: int, shape: tuple[int, int, int], rule: Rule, device: torch.device) -> RecurrenceInputs:
    tokens = draw_tokens(count, *shape, count, rule)
    q, k, v, log_decay = (each.float().to(device) for each in (tokens.q, tokens.k, tokens.v, tokens.decay.log()))
    beta = None if tokens.beta is None else tokens.beta.float().to(device)
    return RecurrenceInputs(q, k, v, log_decay, beta)


def _states(count: int, shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(3)).to(device)


def _slots(states: torch.Tensor) -> SlotStates:
    """States in slots of a larger pool, in another order; the first request begins with nothing, whatever its slot holds."""
    count = len(states)
    held, slots = states.new_full((count + 2, *states.shape[1:]), 7.0), torch.arange(count, 0, -1, device=states.device)
    held[slots] = states
    is_fresh = torch.arange(count, device=states.device) == 0
    return SlotStates(held, slots, is_fresh)


def _identity(rule: Rule, shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    heads, keys, _ = shape
    return rule.compact(torch.eye(keys, device=device).expand(2, heads, keys, keys)).contiguous()


def test_scan(rule: Rule, shape: tuple[int, int, int], device: torch.device) -> None:
    """Two runs of a chunk and a little, and one token less than a chunk, each with its transition."""
    inputs, cu_runs = _inputs(128, shape, rule, device), (0, 65, 128)
    starts, identity = _states(2, shape, device), _identity(rule, shape, device)
    expected = naive.scan(inputs, cu_runs, starts, identity)
    actual = kernels.scan(inputs, cu_runs, starts, identity)
    assert_close(actual.outputs, expected.outputs, TOLERANCE)
    assert_close(actual.states, expected.states, TOLERANCE)
    assert actual.transitions is not None
    assert expected.transitions is not None
    assert_close(actual.transitions, expected.transitions, TOLERANCE)
    joined = naive.scan(inputs, (0, 128), starts[:1], None)
    assert_far(actual.states[1], joined.states[0], TOLERANCE)


@pytest.mark.parametrize("seams", [(0, 5), (37, 8)], ids=str)
def test_capture(seams: tuple[int, int], rule: Rule, device: torch.device) -> None:
    """Seams, bodies and transitions in one launch; the first run of the second case is all seam."""
    shape = SHAPES[0]
    inputs, cu_runs = _inputs(110, shape, rule, device), (0, 37, 110)
    starts, given = _states(2, shape, device), 0.5 * _identity(rule, shape, device)
    expected = naive.capture(inputs, cu_runs, seams, starts, given)
    actual = kernels.capture(inputs, cu_runs, seams, starts, given)
    assert_close(actual.outputs, expected.outputs, TOLERANCE)
    assert_close(actual.states, expected.states, TOLERANCE)
    assert_close(actual.seam_states, expected.seam_states, TOLERANCE)
    assert_close(actual.transitions, expected.transitions, TOLERANCE)
    assert_far(naive.capture(inputs, cu_runs, (0, 0), starts, given).transitions, actual.transitions, TOLERANCE)
    fresh, known = (form.capture(inputs, cu_runs, seams, starts, None) for form in (kernels, naive))
    assert_close(fresh.transitions, known.transitions, TOLERANCE)
    assert_close(fresh.transitions, 2.0 * actual.transitions, TOLERANCE)


def test_runs_of_no_token(rule: Rule, device: torch.device) -> None:
    shape = SHAPES[0]
    inputs, cu_runs = _inputs(3, shape, rule, device), (0, 0, 3)
    starts, identity = _states(2, shape, device), _identity(rule, shape, device)
    actual = kernels.scan(inputs, cu_runs, starts, identity)
    assert torch.equal(actual.states[0], starts[0])
    assert actual.transitions is not None
    assert torch.equal(actual.transitions[0], identity[0])
    assert_close(actual.states[1], naive.scan(inputs, (0, 3), starts[1:], None).states[0], TOLERANCE)


def test_walk(rule: Rule, shape: tuple[int, int, int], device: torch.device) -> None:
    """Two requests: live runs, an empty one, bodies, one that forgets everything, and kept states."""
    inputs, starts = _inputs(100, shape, rule, device), _states(2, shape, device)
    source = naive.scan(_inputs(40, shape, rule, device), (0, 20, 40), 0 * starts, _identity(rule, shape, device))
    assert source.transitions is not None
    body = Body(source.transitions[0], source.states[0])
    bodies = [body, None, Body(None, source.states[1]), body]
    walk = PartWalk((0, 3, 70, 70, 100), (0, 2, 4))
    slots = _slots(starts)
    starts[0] = 0.0
    expected = naive.walk(inputs, walk, starts, bodies, (0, 2))
    actual = kernels.walk(inputs, walk, slots, bodies, (0, 2))
    assert_close(actual.outputs, expected.outputs, TOLERANCE)
    assert_close(slots.held[slots.slots], expected.states, TOLERANCE)
    assert torch.equal(slots.held[0], torch.full_like(starts[0], 7.0))
    assert actual.kept.keys() == expected.kept.keys()
    for part, state in expected.kept.items():
        assert_close(actual.kept[part], state, TOLERANCE)
    for wrong in ([None, None, bodies[2], body], [Body(None, body.end_state), *bodies[1:]]):
        assert_far(naive.walk(inputs, walk, starts, wrong).states, slots.held[slots.slots], TOLERANCE)


@pytest.mark.parametrize("chunk_tokens", [16, 64])
def test_a_recorded_walk_takes_over_others(rule: Rule, chunk_tokens: int, device: torch.device) -> None:
    """What recorded combines replay: one course in tensors that stay, with room for tokens, chunks, parts and bodies."""
    shape = SHAPES[0]
    source = naive.scan(
        _inputs(40, shape, rule, device), (0, 20, 40), _states(2, shape, device), _identity(rule, shape, device)
    )
    assert source.transitions is not None
    one, two = (Body(*pair) for pair in zip(source.transitions, source.states, strict=True))
    if rule.every_channel and chunk_tokens == 64:
        pytest.skip("decays of every channel have short chunks alone")
    room = WalkRoom(tokens=96, parts=6, chunks=9, requests=2, kept=1, chunk_tokens=chunk_tokens)
    fixed, recorded = (
        kernels.FixedWalk(rule.every_channel, room, device, joins=False),
        PartWalk((0, 96), (0, 1, 2)),
    )
    fixed.prepare(recorded)
    starts = _states(2, shape, device)
    for walk, bodies, kept in (
        (PartWalk((0, 3, 30, 30, 80), (0, 2, 4)), [one, None, two, None], 0),
        (PartWalk((0, 70, 72), (0, 1, 2)), [two, None], 1),
        (PartWalk((0, 1, 2, 3, 4, 5), (0, 4, 5)), [one, two, one, None, None], 2),
    ):
        inputs = _inputs(96, shape, rule, device)
        expected = naive.walk(inputs[: walk.num_tokens], walk, starts, bodies, (kept,))
        fixed.refill(walk, [body is not None for body in bodies], [kept])
        stored = locate([body for body in bodies if body is not None], starts)
        slots = SlotStates(starts.clone(), torch.arange(2, device=device))
        actual = kernels.walk(inputs, recorded, slots, (), (0,), stored)
        assert_close(actual.outputs[: walk.num_tokens], expected.outputs, TOLERANCE)
        assert_close(slots.held, expected.states, TOLERANCE)
        assert_close(actual.kept[0], expected.kept[kept], TOLERANCE)
    stale = naive.walk(inputs[:80], PartWalk((0, 3, 30, 30, 80), (0, 2, 4)), starts, [one, None, two, None])
    assert_far(slots.held, stale.states, TOLERANCE)
    with pytest.raises(ValueError, match="do not fit into a column"):
        fixed.refill(PartWalk(tuple(range(0, 96, 2)), (0, 24, 47)), [True] * 47, [0])


def test_value_heads_share_a_key_head(device: torch.device) -> None:
    """Scan, capture and step take the key heads as they are; which value heads share one matters."""
    drawn = _inputs(70, (4, 12, 7), Rule.GATED_DELTA, device)
    shared = RecurrenceInputs(drawn.q[:, ::2], drawn.k[:, ::2], drawn.v, drawn.log_decay, drawn.beta)
    q, k = (each[:, [0, 2, 0, 2]] for each in (drawn.q, drawn.k))
    wrong = RecurrenceInputs(q, k, drawn.v, drawn.log_decay, drawn.beta)
    starts, eye = _states(1, (4, 12, 7), device), torch.eye(12, device=device).expand(1, 4, 12, 12)
    expected = naive.capture(shared.spread(), (0, 70), (3,), starts, eye)
    actual = kernels.capture(shared, (0, 70), (3,), starts, eye)
    for name in ("outputs", "states", "seam_states", "transitions"):
        assert_close(getattr(actual, name), getattr(expected, name), TOLERANCE)
    assert_far(naive.capture(wrong, (0, 70), (3,), starts, eye).states, actual.states, TOLERANCE)
    stepped, moved, slots = starts.clone(), starts.clone(), torch.zeros(1, dtype=torch.int64, device=device)
    assert_close(kernels.step(shared[:1], moved, slots), naive.step(shared[:1], stepped, slots), TOLERANCE)
    assert_close(moved, stepped, TOLERANCE)


def test_half_precision_comes_in_and_goes_out(device: torch.device) -> None:
    """States stay fp32, as exact as of the same numbers widened; outputs are rounded to the dtype of the values."""
    shape = SHAPES[1]
    wide = _inputs(70, shape, Rule.GATED_DELTA, device)
    half = RecurrenceInputs(wide.q.half(), wide.k.half(), wide.v.half(), wide.log_decay, wide.beta)
    rounded = RecurrenceInputs(half.q.float(), half.k.float(), half.v.float(), wide.log_decay, wide.beta)
    starts, identity = _states(1, shape, device), _identity(Rule.GATED_DELTA, shape, device)[:1]
    expected = naive.scan(rounded, (0, 70), starts, identity)
    actual = kernels.scan(half, (0, 70), starts, identity)
    assert actual.outputs.dtype == torch.float16
    assert_close(actual.outputs.float(), expected.outputs, 2e-3)
    assert_close(actual.states, expected.states, TOLERANCE)
    assert actual.transitions is not None
    assert expected.transitions is not None
    assert_close(actual.transitions, expected.transitions, TOLERANCE)
    assert_far(expected.states.bfloat16().float(), actual.states, TOLERANCE)


def test_step(rule: Rule, shape: tuple[int, int, int], device: torch.device) -> None:
    inputs, slots = _inputs(2, shape, rule, device), torch.tensor([3, 1], device=device)
    expected, actual = _states(4, shape, device), _states(4, shape, device)
    outputs = naive.step(inputs, expected, slots)
    assert_close(kernels.step(inputs, actual, slots), outputs, TOLERANCE)
    assert_close(actual, expected, TOLERANCE)
    assert_far(actual[3], _states(4, shape, device)[3], TOLERANCE)


def test_gates_that_forget_at_once(rule: Rule, device: torch.device) -> None:
    """Neither an overflow nor a slow gate lost beside a fast one, against fp64."""
    shape = SHAPES[0]
    inputs = _inputs(70, shape, rule, device)
    fast = torch.rand(inputs.log_decay.shape, generator=torch.Generator().manual_seed(1)) < 0.1
    log_decay = torch.where(fast.to(device), -200.0, inputs.log_decay)
    harsh = RecurrenceInputs(inputs.q, inputs.k, inputs.v, log_decay, inputs.beta)
    starts, identity = _states(1, shape, device), _identity(rule, shape, device)[:1]
    actual = kernels.scan(harsh, (0, 70), starts, identity)
    expected = naive.scan(_in_fp64(harsh), (0, 70), starts.double(), identity.double())
    assert_close(actual.outputs, expected.outputs, TOLERANCE)
    assert_close(actual.states, expected.states, TOLERANCE)


def test_keys_that_repeat(rule: Rule, device: torch.device) -> None:
    """One key for all tokens, hardly any decay: powers of a chunk's system would reach 1e18 before they cancel."""
    shape = SHAPES[0]
    drawn = _inputs(70, shape, rule, device)
    beta = None if drawn.beta is None else torch.full_like(drawn.beta, 0.99)
    key = drawn.k[:1].expand_as(drawn.k).contiguous()
    same = RecurrenceInputs(drawn.q, key, drawn.v, 1e-3 * drawn.log_decay, beta)
    starts, identity = _states(1, shape, device), _identity(rule, shape, device)[:1]
    actual = kernels.scan(same, (0, 70), starts, identity)
    expected = naive.scan(_in_fp64(same), (0, 70), starts.double(), identity.double())
    assert actual.transitions is not None
    assert expected.transitions is not None
    assert_close(actual.outputs, expected.outputs, TOLERANCE)
    assert_close(actual.states, expected.states, TOLERANCE)
    assert_close(actual.transitions, expected.transitions, TOLERANCE)


def _in_fp64(inputs: RecurrenceInputs) -> RecurrenceInputs:
    beta = None if inputs.beta is None else inputs.beta.double()
    return RecurrenceInputs(inputs.q.double(), inputs.k.double(), inputs.v.double(), inputs.log_decay.double(), beta)


@pytest.mark.parametrize("shape", [(4, 40, 72), (2, 128, 20)], ids=str)
def test_runs_in_bf16(shape: tuple[int, int, int], device: torch.device) -> None:
    """Long runs that go chunk by chunk through the state: states are as exact as of the same numbers widened, outputs rounded."""
    # The interpreter cuts bf16 numbers off where a GPU rounds them.
    tolerance = 1e-4
    drawn = _inputs(150, shape, Rule.GATED_DELTA, device)
    q, k, v = (each.bfloat16() for each in (drawn.q[:, ::2], drawn.k[:, ::2], drawn.v))
    shared = RecurrenceInputs(q, k, v, drawn.log_decay, drawn.beta)
    wide = RecurrenceInputs(q.float(), k.float(), v.float(), drawn.log_decay, drawn.beta).spread()
    starts, given = (
        _states(3, shape, device),
        0.5 * _identity(Rule.GATED_DELTA, shape, device)[:1].expand(3, -1, -1, -1),
    )
    cu_runs, seams = (0, 70, 75, 150), (5, 5, 0)
    expected = naive.capture(wide, cu_runs, seams, starts, given)
    actual = kernels.capture(shared, cu_runs, seams, starts, given)
    assert actual.outputs.dtype == torch.bfloat16
    assert_close(actual.outputs.float(), expected.outputs, 2e-2)
    for name in ("states", "seam_states", "transitions"):
        assert_close(getattr(actual, name), getattr(expected, name), tolerance)
        assert_far(getattr(expected, name).bfloat16().float(), getattr(actual, name), tolerance)
    assert_far(naive.capture(wide, cu_runs, (0, 0, 0), starts, given).transitions, actual.transitions, tolerance)
    walk = PartWalk((0, 70, 70, 150), (0, 2, 3))
    fresh = kernels.capture(shared, cu_runs, seams, starts, None)
    assert_close(fresh.transitions, 2.0 * actual.transitions, tolerance)
    slots = _slots(starts[:2])
    starts[0] = 0.0
    walked, known = (
        kernels.walk(shared, walk, slots, [None] * 3, (1,)),
        naive.walk(wide, walk, starts[:2], [None] * 3, (1,)),
    )
    assert_close(walked.outputs.float(), known.outputs, 2e-2)
    assert_close(slots.held[slots.slots], known.states, tolerance)
    assert_close(walked.kept[1], known.kept[1], tolerance)


@pytest.mark.parametrize("shape", [(4, 40, 72), (2, 128, 20), (2, 64, 64)], ids=str)
def test_walk_in_bf16(shape: tuple[int, int, int], device: torch.device) -> None:
    """As `test_walk`, chunk and body in one step; then the same walk as a recorded one, with room for more."""
    tolerance = 1e-4
    starts = _states(2, shape, device)
    source = naive.scan(
        _inputs(40, shape, Rule.GATED_DELTA, device),
        (0, 20, 40),
        0 * starts,
        _identity(Rule.GATED_DELTA, shape, device),
    )
    assert source.transitions is not None
    body = Body(source.transitions[0], source.states[0])
    bodies = [body, None, Body(None, source.states[1]), body]
    drawn = _inputs(112, shape, Rule.GATED_DELTA, device)
    q, k, v = (each.bfloat16() for each in (drawn.q[:, ::2], drawn.k[:, ::2], drawn.v))
    shared = RecurrenceInputs(q, k, v, drawn.log_decay, drawn.beta)
    wide = RecurrenceInputs(q.float(), k.float(), v.float(), drawn.log_decay, drawn.beta).spread()
    walk = PartWalk((0, 3, 70, 70, 100), (0, 2, 4))
    slots, again = _slots(starts), _slots(starts)
    starts[0] = 0.0
    expected = naive.walk(wide[:100], walk, starts, bodies, (0, 2))
    actual = kernels.walk(shared[slice(0, 100)], walk, slots, bodies, (0, 2))
    room = WalkRoom(tokens=112, parts=6, chunks=12, requests=2, kept=2, chunk_tokens=16)
    fixed, recorded = kernels.FixedWalk(False, room, device, joins=True), PartWalk((0, 112), (0, 1, 2))
    fixed.prepare(recorded)
    fixed.refill(walk, [body is not None for body in bodies], [0, 2])
    replayed = kernels.walk(
        shared, recorded, again, (), (0, 1), locate([own for own in bodies if own is not None], starts)
    )
    for moved, result, kept in ((slots, actual, (0, 2)), (again, replayed, (0, 1))):
        assert_close(result.outputs[:100].float(), expected.outputs, 2e-2)
        assert_close(moved.held[moved.slots], expected.states, tolerance)
        assert torch.equal(moved.held[0], torch.full_like(starts[0], 7.0))
        for known, own in zip((0, 2), kept, strict=True):
            assert_close(result.kept[own], expected.kept[known], tolerance)
    for wrong in ([None, None, bodies[2], body], [Body(None, body.end_state), *bodies[1:]]):
        assert_far(naive.walk(wide[:100], walk, starts, wrong).states, slots.held[slots.slots], tolerance)
