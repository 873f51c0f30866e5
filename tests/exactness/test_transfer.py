"""States that leave the engine's memory and come back are the same bytes, in every family and under every encoding."""

from collections.abc import Sequence

import pytest
import torch

from services.blob.encodings import EXACT, Precision, StateEncoding
from services.blob.tensors import plane_of, tensor_of
from services.worker.engine.combine_plan import CombinePart
from services.worker.engine.context import CaptureProfile
from services.worker.engine.pages import NoRoomError
from services.worker.engine.seam import SeamWindow
from services.worker.engine.states import SegmentState
from services.worker.engine.transfer import IncomingState, OutgoingState
from tests.exactness.conftest import RigFactory
from tests.exactness.rig import PassRig, draw_ids

SEGMENT = draw_ids(93, 2)
KEY = b"segment"
INT8, BFLOAT16 = Precision.INT8, Precision.BFLOAT16
COMPACT = StateEncoding(INT8, INT8, INT8, negligible_decay=1e-3, conv_tail=INT8)
SLOW = StateEncoding(Precision.FLOAT8, Precision.FLOAT8, BFLOAT16, 0.5, 1e-3, Precision.FLOAT8)
HALF = StateEncoding(BFLOAT16, INT8, BFLOAT16, slow_decay=0.2, conv_tail=BFLOAT16)


def _profile(encoding: StateEncoding) -> CaptureProfile:
    return CaptureProfile(SeamWindow(4), draw_ids(6, 1), chunk_tokens=64, encoding=encoding)


def _same_bytes(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(first, second, strict=True)
    )


def _take_out(rig: PassRig, state: SegmentState) -> list[dict[str, torch.Tensor]]:
    """Every layer's planes, by way of bytes."""
    outgoing = OutgoingState(rig.context, state)
    layers = [
        {name: tensor_of(plane_of(layer, name, tensor)) for name, tensor in outgoing.read_layer(layer).items()}
        for layer in range(len(outgoing.layers))
    ]
    outgoing.close()
    return layers


def _bring_in(rig: PassRig, layers: Sequence[dict[str, torch.Tensor]]) -> SegmentState:
    incoming = IncomingState(rig.context, SEGMENT)
    for layer, planes in enumerate(layers):
        incoming.write_layer(layer, planes)
    incoming.finish(KEY)
    state = rig.context.store.get_segment(KEY, SEGMENT)
    assert state is not None
    return state


@pytest.mark.parametrize("encoding", [EXACT, COMPACT, SLOW, HALF], ids=["exact", "compact", "slow", "half"])
def test_there_and_back(encoding: StateEncoding, make_rig: RigFactory) -> None:
    """Bitwise, and so are the logits of a prompt that uses it; into other pages than it came from."""
    rig = make_rig(_profile(encoding))
    state = rig.capture(SEGMENT)[0]
    before, live = rig.fingerprint(state), CombinePart(draw_ids(5, 3))
    logits = rig.logits(CombinePart(SEGMENT, state), live)
    again = _bring_in(rig, _take_out(rig, state))
    assert not set(again.pages) & set(state.pages)
    assert _same_bytes(before, rig.fingerprint(again))
    assert torch.equal(logits, rig.logits(CombinePart(SEGMENT, again), live))
    assert not list(rig.context.holds)


def test_an_encoding_changes_a_state(make_rig: RigFactory) -> None:
    """Control: captured under it, end states and tails differ from exact ones, by little."""
    exact, compact = (make_rig(_profile(encoding)).capture(SEGMENT)[0] for encoding in (EXACT, COMPACT))
    for one, other in zip(exact.planes, compact.planes, strict=True):
        for own, encoded in ((one.end_state, other.end_state), (one.tail, other.tail)):
            assert not own.numel() or 1e-3 < (own - encoded).norm() / own.norm() < 5e-2


def test_pages_stay_while_a_state_is_copied(make_rig: RigFactory) -> None:
    rig = make_rig(_profile(EXACT))
    state = rig.capture(SEGMENT)[0]
    outgoing = OutgoingState(rig.context, state)
    rig.context.pages.release(state.pages)
    assert all(rig.context.pages.num_references(page) == 1 for page in state.pages)
    outgoing.close()
    assert not any(rig.context.pages.num_references(page) for page in state.pages)


def test_what_does_not_fit_gives_its_room_back(make_rig: RigFactory) -> None:
    rig = make_rig(_profile(EXACT))
    layers = _take_out(rig, rig.capture(SEGMENT)[0])
    free = rig.context.pages.num_free
    for damaged in (
        {name: tensor[:-1] for name, tensor in layers[0].items()},
        {name: tensor for name, tensor in layers[0].items() if name not in ("end_state", "keys", "latents")},
    ):
        incoming = IncomingState(rig.context, SEGMENT)
        with pytest.raises(ValueError, match=r"not|missing"):
            incoming.write_layer(0, damaged)
        incoming.abandon()
    incoming = IncomingState(rig.context, SEGMENT)
    incoming.write_layer(0, layers[0])
    with pytest.raises(ValueError, match="1 layers have come of"):
        incoming.finish(KEY)
    assert rig.context.pages.num_free == free
    rig.context.pages.allocate(free)
    with pytest.raises(NoRoomError):
        IncomingState(rig.context, SEGMENT)
    assert not list(rig.context.holds)
