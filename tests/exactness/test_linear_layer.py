"""A whole linear layer with its convolution, given the same hidden inputs: exact for `w ≥ K − 1`, approximate below."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.engine.context import CaptureProfile
from services.worker.engine.seam import SeamWindow
from services.worker.mixers.batch import CaptureBatch, CombineBatch, LinearCarry, LinearPlane
from services.worker.mixers.linear import LinearMixer
from services.worker.mixers.shapes import TransitionKind
from services.worker.ops.layout import PartWalk
from services.worker.ops.paged_attention import PagedQueries
from tests.exactness.conftest import RigFactory
from tests.exactness.reference_model import ReferenceLinear, ReferenceModel
from tests.exactness.rig import PassRig, assert_close, assert_far

NOWHERE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class LayerRig:
    """The first linear layer of the engine beside the public module with the same weights."""

    mixer: LinearMixer
    public: ReferenceLinear
    device: torch.device

    @property
    def history(self) -> int:
        """`K − 1`."""
        return self.mixer.shape.conv_taps - 1

    def full(self, hidden: torch.Tensor) -> torch.Tensor:
        """The public module over the whole sequence `[N, hidden]`."""
        with torch.inference_mode():
            return self.public.public(hidden.double())

    def capture(self, hidden: torch.Tensor, window: int) -> LinearPlane:
        """The plane of one segment alone, from nothing."""
        return self.capture_pack([hidden], window)[0]

    @torch.inference_mode()
    def capture_pack(self, segments: Sequence[torch.Tensor], window: int) -> list[LinearPlane]:
        """The planes of several segments whose rows go through the layer together."""
        state, tail = self.mixer.slots.states[0], self.mixer.slots.tails[0]
        carries = [LinearCarry(torch.zeros_like(state), torch.zeros_like(tail)) for _ in segments]
        cu_runs = (0, *accumulate(len(segment) for segment in segments))
        places = torch.cat([torch.arange(len(segment)) for segment in segments]).to(self.device)
        batch = CaptureBatch(
            PartWalk(cu_runs, tuple(range(len(segments) + 1))),
            (window,) * len(segments),
            PagedQueries(places, cu_runs, ()),
            0,
            NOWHERE,
            [[carry] for carry in carries],
        )
        self.mixer.capture(torch.cat(list(segments)).to(self.device), batch)
        return self.mixer.finish(carries, [window] * len(carries))

    @torch.inference_mode()
    def combine(
        self, live: Sequence[torch.Tensor], planes: Sequence[LinearPlane | None], positions: Sequence[range]
    ) -> torch.Tensor:
        """Outputs of live runs at their positions, each before its body, from an empty slot."""
        slots = self.mixer.slots
        slots.states[0].zero_()
        slots.tails[0].zero_()
        walk = PartWalk((0, *accumulate(len(run) for run in live)), (0, len(live)))
        stored = [None if plane is None else [plane] for plane in planes]
        slot = torch.zeros(1, dtype=torch.int64, device=self.device)
        places = torch.tensor([place for run in positions for place in run], device=self.device)
        bodies = [run.stop for run in positions]
        batch = CombineBatch(walk, PagedQueries(places, (0, walk.num_tokens), ()), NOWHERE, slot, stored, bodies)
        return self.mixer.combine(torch.cat(list(live)).to(self.device), batch)


@pytest.fixture
def layer(make_rig: RigFactory, reference: ReferenceModel) -> LayerRig:
    rig: PassRig = make_rig(CaptureProfile(SeamWindow(4), ()))
    for own, public in zip(rig.context.model.layers, reference.mixers, strict=True):
        if isinstance(own.mixer, LinearMixer) and isinstance(public, ReferenceLinear):
            return LayerRig(own.mixer, public, rig.context.device)
    pytest.skip("the family has no linear layer")


def _hidden(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 48, generator=torch.Generator().manual_seed(seed))


Edit = Callable[[LinearPlane], LinearPlane]


def _composed_and_full(
    layer: LayerRig,
    lengths: Sequence[int],
    window: int,
    edit: Edit = lambda plane: plane,
    captured_from: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs at live tokens of segments and a live end: by composition, and by the public module."""
    segments = [_hidden(length, index) for index, length in enumerate(lengths)]
    start = window if captured_from is None else captured_from
    planes: list[LinearPlane | None] = [edit(layer.capture(segment, start)) for segment in segments]
    live = [*(segment[:window] for segment in segments), _hidden(6, 99)]
    starts = [0, *accumulate(lengths)]
    positions = [*(range(start, start + window) for start in starts[:-1]), range(starts[-1], starts[-1] + 6)]
    actual = layer.combine(live, [*planes, None], positions)
    rows = [place for run in positions for place in run]
    return actual, layer.full(torch.cat([*segments, _hidden(6, 99)]))[rows]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    bodies=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 120)), min_size=1, max_size=4),
    extra=st.integers(0, 8),
)
def test_exact_from_a_window_that_fills_the_history(layer: LayerRig, bodies: list[int], extra: int) -> None:
    window = layer.history + extra
    lengths = [window + max(body, layer.history, 1) for body in bodies]
    actual, full = _composed_and_full(layer, lengths, window)
    assert_close(actual, full)


def test_approximate_below(layer: LayerRig) -> None:
    if not layer.history:
        pytest.skip("without a convolution every window is exact")
    for window in range(layer.history):
        actual, full = _composed_and_full(layer, [30, 25, 40], window)
        assert_far(actual, full)


@pytest.mark.parametrize("mistake", ["zero", "transposed", "tail", "forgotten"])
def test_controls(layer: LayerRig, mistake: str) -> None:
    if mistake == "transposed" and layer.mixer.shape.transition is not TransitionKind.DENSE:
        pytest.skip("a diagonal is its own transpose")
    if mistake == "tail" and not layer.history:
        pytest.skip("the family has no convolution")
    edits: dict[str, Edit] = {
        "zero": lambda plane: replace(plane, transition=0 * plane.transition),
        "transposed": lambda plane: replace(plane, transition=plane.transition.transpose(1, 2).contiguous()),
        "tail": lambda plane: replace(plane, tail=torch.cat([0 * plane.tail[:1], plane.tail[:-1]])),
        "forgotten": lambda plane: replace(plane, end_state=0 * plane.end_state),
    }
    lengths, window = [30, 25, 40], layer.history + 1
    assert_close(*_composed_and_full(layer, lengths, window))
    assert_far(*_composed_and_full(layer, lengths, window, edits[mistake]))


def test_a_window_counted_twice_is_seen(layer: LayerRig) -> None:
    """Live window in front of a transition that was captured over the window too."""
    assert_far(*_composed_and_full(layer, [12, 14], layer.history + 2, captured_from=0))


def test_swapped_bodies_are_seen(layer: LayerRig) -> None:
    window = layer.history
    segments = [_hidden(30, 0), _hidden(30, 1)]
    planes: list[LinearPlane | None] = [layer.capture(segment, window) for segment in segments]
    live = [segments[0][:window], segments[1][:window], _hidden(6, 99)]
    positions = [range(window), range(30, 30 + window), range(60, 66)]
    full = layer.full(torch.cat([*segments, _hidden(6, 99)]))[-6:]
    assert_close(layer.combine(live, [*planes, None], positions)[-6:], full)
    assert_far(layer.combine(live, [planes[1], planes[0], None], positions)[-6:], full)


def _tensors(plane: LinearPlane) -> tuple[torch.Tensor, ...]:
    return plane.transition, plane.end_state, plane.tail, plane.decay


def test_packed_rows_keep_segments_apart(layer: LayerRig) -> None:
    """As an accelerator captures: within rounding of the segment alone, bitwise whatever the neighbours hold."""
    segment, window = _hidden(50, 1), layer.history
    alone = layer.capture(segment, window)
    packs = [layer.capture_pack([_hidden(70, seed), segment, _hidden(9, seed + 1)], window) for seed in (20, 30)]
    for own, first, second in zip(_tensors(alone), _tensors(packs[0][1]), _tensors(packs[1][1]), strict=True):
        if own.numel():
            assert_close(first, own, 1e-5)
        assert torch.equal(first, second)
    assert_far(packs[0][0].end_state, packs[1][0].end_state)


def test_packed_planes_hold_no_memory_of_their_neighbours(layer: LayerRig) -> None:
    """A plane that is a view of the whole pack would keep it alive, uncounted, when the others are dropped."""
    for plane in layer.capture_pack([_hidden(70, 1), _hidden(50, 2)], layer.history):
        for tensor in _tensors(plane):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
