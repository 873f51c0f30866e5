"""Recorded combines and decode steps over kernels in the interpreter, with a recorder that repeats instead of replaying.

What fresh memory holds is NaN here: whatever the room of a recorded pass reaches is seen. On a GPU
`tests/exactness/test_combine_graphs.py` holds the same with real recordings.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from services.worker.engine import fixed_batches, kernel_passes, packed_prompts, sweep_graphs
from services.worker.engine.capture import CapturePass
from services.worker.engine.capture_rows import CaptureRows
from services.worker.engine.combine import CombinePass, CombineRows
from services.worker.engine.combine_plan import CombinePart, CombinePlan
from services.worker.engine.context import CaptureProfile, EngineContext
from services.worker.engine.decode import DecodeLoop, PlainDecoder, RunningRequest
from services.worker.engine.decode_graph import DecodeGraphs
from services.worker.engine.recorder import Recording
from services.worker.engine.requests import GenerateEvent, GenerateRequest, PromptPart, TokenEvent
from services.worker.engine.sampling import Sampler, SamplingOptions, find_likeliest
from services.worker.engine.seam import SeamWindow
from services.worker.engine.states import SegmentState
from services.worker.engine.sweep import Sweep
from services.worker.engine.sweep_graphs import SweepGraphs, choose_sweep_graphs
from services.worker.ops import device as kernel_devices
from services.worker.ops.paged_attention import PagedQueries
from services.worker.ops.paged_attention import dispatch as paged_attention
from tests.exactness.rig import PassRig, assert_close, assert_far, create_context, draw_ids, finish
from tests.models import VARIANTS, CheckpointFactory, Variant

# Rows of the room compute with NaN, of which numpy warns in the interpreter.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    # Whole models in the interpreter: two minutes on an idle core.
    pytest.mark.timeout(900),
]

TOLERANCE = 1e-4
MOE, RING = (
    next(variant for variant in VARIANTS if variant.name == name)
    for name in ("qwen3_5_moe-standard", "ring-2.5-low-rank")
)


class Repeater:
    """Recording leaves states and pages as they were; a replay runs the work again into the tensors it first gave."""

    def __init__(self, context: EngineContext, refuses: bool = False) -> None:
        memory = context.memory
        self._moved = [tensor for slots in memory.linear_slots for tensor in (slots.states, slots.tails)]
        self._moved += [tensor for pool in memory.page_pools for tensor in (pool.keys, pool.values)]
        self._refuses = refuses
        self.num_replays = 0

    def record(self, run: Callable[[], Sequence[torch.Tensor]]) -> Recording:
        if self._refuses:
            raise RuntimeError("this device records nothing")
        before = [tensor.clone() for tensor in self._moved]
        outputs = [tensor.clone() for tensor in run()]
        for tensor, old in zip(self._moved, before, strict=True):
            tensor.copy_(old)

        def replay() -> None:
            self.num_replays += 1
            for kept, again in zip(outputs, run(), strict=True):
                kept.copy_(again)

        return Recording(outputs, replay)


@pytest.fixture
def variant() -> Variant:
    return MOE


@pytest.fixture
def rig(checkpoints: CheckpointFactory, variant: Variant, monkeypatch: pytest.MonkeyPatch) -> PassRig:
    """Plain forms capture; from then on kernels run."""
    if "TRITON_INTERPRET" not in os.environ:
        pytest.skip("kernels run in Triton's interpreter on a CPU only; HYPIC_DEVICE names a GPU")
    profile = CaptureProfile(SeamWindow(4), draw_ids(3, 9))
    rig = PassRig(create_context(checkpoints.directory(variant), torch.device("cpu"), profile))
    rig.capture(draw_ids(20, 1))
    for module in (kernel_devices, paged_attention, packed_prompts, kernel_passes):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
    monkeypatch.setattr(PagedQueries, "prepare", _prepare_as_replayed)
    # The interpreter takes minutes over the rows of larger rooms.
    monkeypatch.setattr(fixed_batches, "_step_captured", lambda tokens: 64)
    monkeypatch.setattr(fixed_batches, "_LEAST_BESIDE", 32)
    return rig


def _prepare_as_replayed(queries: PagedQueries, key: str, work_out: Callable[[], object]) -> object:
    """A replay works out cosines and sines anew, as part of what was recorded."""
    if key.startswith("turns ") or key not in queries.prepared:
        queries.prepared[key] = work_out()
    return queries.prepared[key]


def _plans(rig: PassRig, monkeypatch: pytest.MonkeyPatch) -> list[CombinePlan]:
    """Two prompts of one room, of other lengths, bodies and page tables; a snapshot behind the first part."""
    with monkeypatch.context() as plain:
        for module in (kernel_devices, paged_attention, packed_prompts, kernel_passes):
            plain.setattr(module, "has_kernels", lambda device: False)
        short, long = rig.capture(draw_ids(21, 2), draw_ids(37, 3))
    parts = [CombinePart(state.token_ids, state) for state in (short, long)]
    first, last = CombinePart(draw_ids(5, 4), keep=True), CombinePart(draw_ids(2, 5))
    return [
        CombinePlan(None, (first, *parts, last), max_tokens=4),
        CombinePlan(
            None, (CombinePart(draw_ids(9, 6), keep=True), parts[1], CombinePart(draw_ids(7, 7))), max_tokens=4
        ),
    ]


@torch.inference_mode()
def _combine(rig: PassRig, plan: CombinePlan, graphs: SweepGraphs | None) -> list[torch.Tensor]:
    """Logits, states, tails and the snapshot's, but tails of families without a convolution."""
    one = CombinePass(rig.context, plan)
    rows = CombineRows(rig.context, [one])
    finish(Sweep(rig.context, [rows]).run() if graphs is None else graphs.run([rows]))
    logits, linear, slot = rows.finish().clone(), rig.context.memory.linear_slots, one.prompt.slot
    states, tails = (torch.stack([getattr(own, name)[slot] for own in linear]) for name in ("states", "tails"))
    kept = [tensor for own in one.snapshots[0].snapshots for tensor in (own.state.clone(), own.tail.clone())]
    one.release()
    return [tensor for tensor in (logits, states, tails, *kept) if tensor.numel()]


@pytest.mark.parametrize("variant", [MOE, RING], ids=lambda variant: variant.name)
def test_recorded_combines(rig: PassRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep, a recording, then replays of either prompt; latents, and states that turn with their bodies' positions."""
    plans, recorder = _plans(rig, monkeypatch), Repeater(rig.context)
    expected = [_combine(rig, plan, None) for plan in plans]
    with monkeypatch.context() as recording:
        recording.setattr(sweep_graphs, "create_recorder", lambda context: recorder)
        graphs = choose_sweep_graphs(rig.context)
    assert graphs is not None
    replays = []
    for index in (0, 0, 1, 0):
        for own, true in zip(_combine(rig, plans[index], graphs), expected[index], strict=True):
            assert_close(own, true, TOLERANCE)
        replays.append(recorder.num_replays)
    assert replays[:2] == [0, 0]
    assert 0 < replays[2] < replays[3]
    assert_far(expected[0][0], expected[1][0], TOLERANCE)


def test_tables_that_have_outgrown_a_recording(rig: PassRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers ahead of the first attention layer have moved the slots by then: the pass begins again, behind a prefix too."""
    plan = _plans(rig, monkeypatch)[0]
    prefix = rig.combine(CombinePart(draw_ids(8, 11), keep=True), CombinePart(draw_ids(2, 12))).snapshots[0]
    for own in (plan, replace(plan, prefix=prefix)):
        graphs, expected = SweepGraphs(rig.context, Repeater(rig.context)), _combine(rig, own, None)
        for _ in range(2):
            _combine(rig, own, graphs)
        with monkeypatch.context() as outgrown:
            outgrown.setattr(sweep_graphs._Recorded, "refill_tables", lambda recorded, rows: False)
            again = _combine(rig, own, graphs)
        for kept, true in zip(again, expected, strict=True):
            assert_close(kept, true, TOLERANCE)


def test_what_cannot_be_recorded_has_its_result(rig: PassRig, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plans(rig, monkeypatch)[1]
    expected, graphs = _combine(rig, plan, None), SweepGraphs(rig.context, Repeater(rig.context, refuses=True))
    for _ in range(3):
        assert_close(_combine(rig, plan, graphs)[0], expected[0], TOLERANCE)


def _capture_rows(rig: PassRig, segments: Sequence[tuple[int, ...]]) -> tuple[CapturePass, CaptureRows]:
    """Several segments in the same rows, as a GPU packs them."""
    one = CapturePass(rig.context, segments, rig.prime)
    packed = [segment for rows in one.take_chunk() for segment in rows._segments]
    return one, CaptureRows(rig.context, packed, range(rig.context.profile.chunk_tokens), rig.prime)


@torch.inference_mode()
def _capture(rig: PassRig, segments: Sequence[tuple[int, ...]], graphs: SweepGraphs | None) -> list[torch.Tensor]:
    one, rows = _capture_rows(rig, segments)
    finish(Sweep(rig.context, [rows]).run() if graphs is None else graphs.run([rows]))
    states = one.finish()
    kept = [tensor for state in states for tensor in rig.fingerprint(state)]
    for state in states:
        rig.context.pages.release(state.pages)
    return kept


# One segment in the room of four, twice, and five in the room of eight.
COLD = [[draw_ids(33, 21)], [draw_ids(60, 22)], [draw_ids(count, 23 + count) for count in (19, 40, 9, 12, 17)]]


@pytest.mark.parametrize("indices", [(0, 0, 1, 0), (2, 2, 2)], ids=["one segment", "several"])
def test_recorded_captures(indices: Sequence[int], rig: PassRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against plain forms: sweeps over kernels, recordings and replays leave the same planes, keys and values."""
    with monkeypatch.context() as plain:
        for module in (kernel_devices, paged_attention, packed_prompts, kernel_passes):
            plain.setattr(module, "has_kernels", lambda device: False)
        expected = {index: _capture(rig, COLD[index], None) for index in set(indices)}
    recorder = Repeater(rig.context)
    graphs, replays = SweepGraphs(rig.context, recorder), []
    for index in indices:
        for own, true in zip(_capture(rig, COLD[index], graphs), expected[index], strict=True):
            assert_close(own, true, TOLERANCE)
        replays.append(recorder.num_replays)
    assert replays[1] == 0 < replays[2]
    assert replays[2:] == sorted(set(replays[2:]))


def test_a_body_of_one_row_of_history_is_captured(rig: PassRig) -> None:
    """A seam of all but the convolution's history still has a body; other segments leave other planes."""
    graphs = SweepGraphs(rig.context, Repeater(rig.context))
    short = [draw_ids(7, 26)]
    plain = _capture(rig, short, None)
    for own, true in zip(_capture(rig, short, graphs), plain, strict=True):
        assert_close(own, true, TOLERANCE)
    assert_far(plain[0], _capture(rig, [draw_ids(7, 27)], None)[0], TOLERANCE)


@torch.inference_mode()
def _cold(
    rig: PassRig, hit: SegmentState, segments: Sequence[tuple[int, ...]], graphs: SweepGraphs | None
) -> list[torch.Tensor]:
    """A prompt over a hit and what its own sweep captures: logits, and what is captured."""
    one, captured = _capture_rows(rig, segments)
    parts = [CombinePart(state.token_ids, state) for state in (*one.states, hit)]
    plan = CombinePlan(None, (CombinePart(draw_ids(5, 4), keep=True), *parts, CombinePart(draw_ids(3, 5))), 4)
    prompt = CombinePass(rig.context, plan)
    rows = CombineRows(rig.context, [prompt])
    finish(Sweep(rig.context, [captured, rows]).run() if graphs is None else graphs.run([captured, rows]))
    logits, states = rows.finish().clone(), one.finish()
    kept = [logits, *(tensor for state in states for tensor in rig.fingerprint(state))]
    kept += [tensor.clone() for own in prompt.snapshots[0].snapshots for tensor in (own.state, own.tail)]
    prompt.release()
    for state in states:
        rig.context.pages.release(state.pages)
    return kept


def test_recorded_sweeps_that_capture(rig: PassRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a prompt composes is captured ahead of it in the same recorded layers."""
    with monkeypatch.context() as plain:
        for module in (kernel_devices, paged_attention, packed_prompts, kernel_passes):
            plain.setattr(module, "has_kernels", lambda device: False)
        (hit,) = rig.capture(draw_ids(21, 2))
        expected = [_cold(rig, hit, segments, None) for segments in COLD[:2]]
    recorder = Repeater(rig.context)
    graphs, replays = SweepGraphs(rig.context, recorder), []
    for index in (0, 1, 0, 1):
        for own, true in zip(_cold(rig, hit, COLD[index], graphs), expected[index], strict=True):
            assert_close(own, true, TOLERANCE)
        replays.append(recorder.num_replays)
    assert replays[1] == 0 < replays[2] < replays[3]
    assert_far(expected[0][0], expected[1][0], TOLERANCE)


def test_layers_are_read_once_they_are_done(rig: PassRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever follows a recorded capture sees no layer ahead of its replay, and every one behind the last."""
    del monkeypatch
    graphs = SweepGraphs(rig.context, Repeater(rig.context))
    for _ in range(2):
        _capture(rig, COLD[0], graphs)
    with torch.inference_mode():
        one, rows = _capture_rows(rig, COLD[0])
        progress, seen = one.watch(0), []
        for _ in graphs.run([rows]):
            seen.append(progress.layers_done)
        one.abandon()
    assert seen[0] < len(rig.context.model.layers) == progress.layers_done
    assert seen == sorted(seen)


def test_one_recorded_pass_runs_at_a_time(rig: PassRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What begins between two layers of a replay is a sweep, and both have their results."""
    del monkeypatch
    expected = _capture(rig, COLD[0], None)
    recorder = Repeater(rig.context)
    graphs = SweepGraphs(rig.context, recorder)
    for _ in range(2):
        _capture(rig, COLD[0], graphs)
    with torch.inference_mode():
        one, rows = _capture_rows(rig, COLD[0])
        running = graphs.run([rows])
        next(running)
        before = recorder.num_replays
        between = _capture(rig, COLD[1], graphs)
        assert recorder.num_replays == before
        finish(running)
        (state,) = one.finish()
    for own, true in zip(rig.fingerprint(state), expected, strict=True):
        assert_close(own, true, TOLERANCE)
    assert_far(between[0], expected[0], TOLERANCE)
    # One that is given up half way leaves the recordings to others.
    with torch.inference_mode():
        one, rows = _capture_rows(rig, COLD[0])
        running = graphs.run([rows])
        next(running)
        running.close()
        one.abandon()
    before = recorder.num_replays
    for own, true in zip(_capture(rig, COLD[0], graphs), expected, strict=True):
        assert_close(own, true, TOLERANCE)
    assert recorder.num_replays > before


class _Reader:
    """One request that decodes, and the tokens that it has heard."""

    def __init__(self, rig: PassRig, plan: CombinePlan, max_tokens: int) -> None:
        self._heard: list[GenerateEvent] = []
        self._rig = rig
        self._combined = rig.combine(*plan.parts, max_tokens=max_tokens)
        sampling = SamplingOptions(max_tokens)
        request = GenerateRequest("r", (PromptPart(()),), sampling, self._heard.append)
        self.running = RunningRequest(request, self._combined.prompt, Sampler(sampling))
        self.running.accept(self._combined.logits, find_likeliest(self._combined.logits[None])[0])

    def end(self) -> list[int]:
        for state in self._combined.snapshots.values():
            self._rig.context.pages.release(state.pages)
        self._combined.prompt.release(self._rig.context)
        return [event.token_id for event in self._heard if isinstance(event, TokenEvent)]


@pytest.mark.parametrize("refuses", [False, True])
@torch.inference_mode()
def test_recorded_steps(refuses: bool, rig: PassRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens over an edge of pages are those of steps that run as they are."""
    plan, recorder = _plans(rig, monkeypatch)[0], Repeater(rig.context, refuses)
    answers = []
    for decoder in (PlainDecoder(rig.context), DecodeGraphs(rig.context, recorder)):
        reader, loop = _Reader(rig, plan, 14), DecodeLoop(rig.context, decoder)
        while not reader.running.finished:
            loop.step([reader.running])
        answers.append(reader.end())
    assert answers[0] == answers[1]
    assert len(answers[0]) == 14
    assert (recorder.num_replays > 0) is not refuses


@torch.inference_mode()
def test_readers_come_and_go(rig: PassRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that was prepared for other readers than those that are there is prepared again."""
    plans = _plans(rig, monkeypatch)
    answers = []
    for decoder in (PlainDecoder(rig.context), DecodeGraphs(rig.context, Repeater(rig.context))):
        loop = DecodeLoop(rig.context, decoder)
        readers = [_Reader(rig, plans[0], 16), _Reader(rig, plans[1], 7)]
        present = [[0], [0], [0], [1], [0, 1], [0, 1], [0, 1], [1, 0], [0], [1], [0], [0]]
        for numbers in present:
            loop.step([readers[number].running for number in numbers])
        answers.append([reader.end() for reader in readers])
    assert answers[0] == answers[1]
    assert [len(tokens) for tokens in answers[0]] == [11, 7]
