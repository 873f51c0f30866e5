"""Nothing but a segment's own tokens and the profile reaches its state: not neighbours, order, memory, or other work."""

from collections.abc import Sequence

import pytest
import torch

from services.worker.engine.combine_plan import CombinePart
from services.worker.engine.context import CaptureProfile
from services.worker.engine.limits import EngineLimits
from services.worker.engine.loop import Engine
from services.worker.engine.requests import (
    CaptureEvent,
    CaptureJob,
    CaptureSegment,
    GenerateEvent,
    GenerateRequest,
    PromptPart,
    Serving,
)
from services.worker.engine.sampling import SamplingOptions
from services.worker.engine.seam import SeamWindow
from services.worker.engine.states import SegmentState
from tests.exactness.conftest import RigFactory
from tests.exactness.rig import PassRig, assert_close, draw_ids, poison

PROFILE = CaptureProfile(SeamWindow(4), draw_ids(6, 1), chunk_tokens=64)
SEGMENT = draw_ids(93, 2)


@pytest.fixture
def rig(make_rig: RigFactory) -> PassRig:
    return make_rig(PROFILE)


def _same_bytes(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(first, second, strict=True)
    )


def test_the_comparison_sees_one_token(rig: PassRig) -> None:
    """Control: another token anywhere in the segment, or another prime, changes every plane."""
    alone = rig.fingerprint(rig.capture(SEGMENT)[0])
    changed = (SEGMENT[0] + 1, *SEGMENT[1:])
    assert not _same_bytes(alone, rig.fingerprint(rig.capture(changed)[0]))
    assert not torch.equal(alone[1], rig.fingerprint(rig.capture((*SEGMENT[:-1], SEGMENT[-1] ^ 1))[0])[1])


def test_other_contents_of_neighbours_change_nothing(rig: PassRig) -> None:
    """Same shapes, other contents: bitwise on every device."""
    packs = [rig.capture(draw_ids(40, seed), SEGMENT, draw_ids(130, seed + 1))[1] for seed in (10, 20)]
    assert _same_bytes(rig.fingerprint(packs[0]), rig.fingerprint(packs[1]))


def test_alone_or_packed(rig: PassRig) -> None:
    """Bitwise on the CPU, within 1e-5 elsewhere, wherever in the pack the segment stands."""
    alone = rig.fingerprint(rig.capture(SEGMENT)[0])
    neighbours = [draw_ids(length, length) for length in (8, 64, 130)]
    for place in range(4):
        packed = rig.capture(*neighbours[:place], SEGMENT, *neighbours[place:])
        kept = rig.fingerprint(packed[place])
        if rig.context.device.type == "cpu":
            assert _same_bytes(alone, kept)
        else:
            for one, other in zip(alone, kept, strict=True):
                assert_close(other, one, 1e-5)
        for state in packed:
            rig.context.pages.release(state.pages)


def test_a_state_holds_no_memory_of_its_neighbours(rig: PassRig) -> None:
    """A plane that is a view of the whole pack would keep it alive, uncounted, when the others are dropped."""
    for state in rig.capture(draw_ids(40, 1), SEGMENT, draw_ids(64, 2)):
        for plane in state.planes:
            for tensor in (plane.transition, plane.end_state, plane.tail, plane.decay):
                assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_poisoned_memory_changes_nothing(rig: PassRig) -> None:
    """What earlier requests left in pages and slots is never read; the prime is captured anew in other pages."""
    alone = rig.fingerprint(rig.capture(SEGMENT)[0])
    rig.context.pages.allocate(7)
    poison(rig.context)
    again = PassRig(rig.context)
    assert _same_bytes(alone, again.fingerprint(again.capture(SEGMENT)[0]))


def test_use_never_alters_a_state(rig: PassRig) -> None:
    """Prompts that share the state, at several places and with decoding behind it, leave its bytes as they were."""
    state = rig.capture(SEGMENT)[0]
    before = rig.fingerprint(state)
    shared = CombinePart(SEGMENT, state)
    prompts = [
        rig.combine(shared, CombinePart(draw_ids(3, 5)), max_tokens=20),
        rig.combine(CombinePart(draw_ids(17, 6)), shared, shared, CombinePart(draw_ids(30, 7)), max_tokens=20),
    ]
    for prompt in prompts:
        rig.decode(prompt, draw_ids(20, 8))
    assert _same_bytes(before, rig.fingerprint(state))
    first = rig.logits(shared, CombinePart(draw_ids(3, 5)))
    assert torch.equal(first, prompts[0].logits)


def _ignore(event: GenerateEvent | CaptureEvent) -> None:
    """Nobody listens."""


def _capture_amid_work(rig: PassRig, seed: int) -> SegmentState:
    """The engine's loop captures the segment while prompts combine and decode and other captures are packed with it."""
    engine = rig.start_engine(EngineLimits(1024, layer_tokens=256))
    for index in range(3):
        parts = (PromptPart(draw_ids(30 + index, seed + index)),)
        engine.submit(GenerateRequest(f"r{index}", parts, SamplingOptions(8), _ignore))
    engine.step()
    others = [CaptureSegment(bytes([seed, index]), draw_ids(20 + seed % 7, seed + 5 + index)) for index in range(2)]
    segments = (others[0], CaptureSegment(bytes([seed]), SEGMENT), others[1])
    engine.submit_capture(CaptureJob("c", segments, _ignore))
    while not engine.is_idle:
        engine.step()
        engine.check_integrity()
    state = rig.context.store.get_segment(bytes([seed]), SEGMENT)
    assert state is not None
    return state


def test_before_and_after_other_work(make_rig: RigFactory) -> None:
    alone = make_rig(PROFILE)
    expected = alone.fingerprint(alone.capture(SEGMENT)[0])
    for seed in (40, 81):
        busy = make_rig(PROFILE)
        kept = busy.fingerprint(_capture_amid_work(busy, seed))
        for one, other in zip(expected, kept, strict=True):
            assert_close(other, one, 1e-5)
        if busy.context.device.type == "cpu":
            assert _same_bytes(expected, kept)


def test_a_hit_answers_like_the_cold_request(make_rig: RigFactory) -> None:
    """Cold (capture, then compose) and warm answers are the same bytes, whoever asked first."""
    rig = make_rig(PROFILE)
    parts = (CombinePart(SEGMENT, rig.capture(SEGMENT)[0]), CombinePart(draw_ids(9, 3)))
    cold = rig.logits(*parts)
    rig.logits(CombinePart(draw_ids(50, 4)))
    assert torch.equal(cold, rig.logits(*parts))


def test_decoding_in_a_batch_equals_decoding_alone(make_rig: RigFactory) -> None:
    """The same request beside others of other kinds draws the same tokens."""

    def tokens_of(engine: Engine, neighbours: int) -> list[GenerateEvent]:
        events: list[GenerateEvent] = []
        segment = PromptPart(SEGMENT, Serving.SEGMENT, b"s")
        watched = (PromptPart(draw_ids(11, 1)), segment, PromptPart(draw_ids(5, 2)))
        for index in range(neighbours):
            parts = (PromptPart(draw_ids(7 * index + 1, index + 50)),)
            engine.submit(GenerateRequest(f"n{index}", parts, SamplingOptions(4 + 5 * index, 1.0, seed=index), _ignore))
        engine.submit(GenerateRequest("watched", watched, SamplingOptions(24), events.append))
        while not engine.is_idle:
            engine.step()
            engine.check_integrity()
        return [event for event in events if "Token" in type(event).__name__]

    rig = make_rig(PROFILE)
    engine = rig.start_engine(EngineLimits(1024))
    engine.submit_capture(CaptureJob("c", (CaptureSegment(b"s", SEGMENT),), _ignore))
    while not engine.is_idle:
        engine.step()
    alone = tokens_of(engine, 0)
    assert len(alone) == 24
    assert tokens_of(engine, 4) == alone
