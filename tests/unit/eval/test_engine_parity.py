"""The evaluation's batches give what the engine's own passes give, and each ablation is what the design says."""

from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from eval.batch import PromptBatch
from eval.capture import CapturedSegment, CapturePlan, PrimeState, capture_segments
from eval.encodings import COMPACT
from eval.layout import Layout, lay_out
from eval.prompts import EvalPrompt, EvidenceTokens
from eval.refresh import choose_blocks
from eval.rig import PAGE_TOKENS, Rig
from eval.settings import Mode, Prime, Refresh, Selection, Setting
from eval.token_scores import by_document, reached
from services.blob.encodings import EXACT, StateEncoding
from services.worker.engine.capture import CapturePass, capture_prime
from services.worker.engine.combine import CombinePass
from services.worker.engine.combine_plan import CombinePart, CombinePlan
from services.worker.engine.context import CaptureProfile, EngineContext
from services.worker.engine.prompt_refresh import choose, question_tokens, refresh_plan
from services.worker.engine.question import question_attention
from services.worker.engine.reach import renewal_scores
from services.worker.engine.refresh import Refreshed, RefreshOrder
from services.worker.engine.refreshed_rows import AttendingRows, RefreshedRows
from services.worker.engine.seam import SeamWindow
from services.worker.engine.states import SegmentState
from services.worker.engine.sweep import Sweep
from services.worker.mixers.batch import CombineBatch, Mixer
from services.worker.mixers.paged_attention import PagedAttention
from services.worker.mixers.state import DeviceMemory
from services.worker.models.registry import load_checkpoint
from tests.families import llama, minimax
from tests.families.variant import Variant
from tests.models import VARIANTS, CheckpointFactory

Result = TypeVar("Result")
TOLERANCE = 2e-4
PRIME = (5, 9, 2, 7)
LENGTHS = (40, 63, 97)
SEAM = 8
WINDOW = SeamWindow(SEAM)
# Its bodies begin inside pages: behind 12, 19 and 27 tokens, the least, the share and the most.
GROWING = SeamWindow(12, 0.3, 27)


def _tokens(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 100, (count,), generator=generator).tolist())


PROMPT = EvalPrompt(
    opening=_tokens(11, 0),
    documents=tuple(_tokens(length, length) for length in LENGTHS),
    closing=_tokens(9, 1),
    answer=(1, 2),
    acceptable=("x",),
    question="?",
    type="one_fact",
    evidence=(EvidenceTokens(1, 30, 33),),
)


@pytest.fixture(scope="module")
def checkpoint(checkpoints: CheckpointFactory) -> Path:
    return checkpoints.directory(VARIANTS[0])


@pytest.fixture(scope="module")
def rig(checkpoint: Path) -> Rig:
    return Rig(checkpoint, "cpu", 20_000, 64)


def _primed(rig: Rig) -> PrimeState:
    layout = Layout(rig)
    layout.add_live(PRIME)
    batch = PromptBatch(rig, [layout])
    batch.combine()
    return PrimeState(len(PRIME), batch.snapshots(0), tuple(layout.rows))


@pytest.fixture(scope="module")
def segments(rig: Rig) -> list[CapturedSegment]:
    with torch.inference_mode():
        primes = [_primed(rig)] * len(LENGTHS)
        return capture_segments(
            rig, PROMPT.documents, primes, CapturePlan((SeamWindow(0), WINDOW, SeamWindow(16), GROWING), (8,))
        )


def _logits(rig: Rig, settings: Sequence[Setting], segments: list[CapturedSegment]) -> torch.Tensor:
    layouts = [
        lay_out(rig, PROMPT, setting, [] if setting.mode.recomputes else segments, None, reserve=8)
        for setting in settings
    ]
    return PromptBatch(rig, layouts).combine()


def _engine_logits(
    checkpoint: Path, window: SeamWindow, compose: bool, encoding: StateEncoding = EXACT
) -> torch.Tensor:
    memory = DeviceMemory(torch.device("cpu"), torch.float32, 200, 16, 4)
    model = load_checkpoint(checkpoint, memory)
    context = EngineContext.create(model, memory, CaptureProfile(window, PRIME, encoding=encoding), 1 << 30)
    states: Sequence[SegmentState | None] = [None] * len(LENGTHS)
    with torch.inference_mode():
        if compose:
            states = _finish(CapturePass(context, PROMPT.documents, capture_prime(context)).run())
        documents = [CombinePart(ids, state) for ids, state in zip(PROMPT.documents, states, strict=True)]
        plan = CombinePlan(None, (CombinePart(PROMPT.opening), *documents, CombinePart(PROMPT.closing)), 4)
        return _finish(CombinePass(context, plan).run())


def _finish(steps: Generator[None, None, Result]) -> Result:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Result = end.value
            return found


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("window", [SeamWindow(0), WINDOW, SeamWindow(16), GROWING])
def test_compose_equals_the_engines_combine_pass(
    rig: Rig, checkpoint: Path, segments: list[CapturedSegment], window: SeamWindow
) -> None:
    expected = _engine_logits(checkpoint, window, compose=True)
    found = _logits(rig, [Setting(Mode.COMPOSE, Prime.START, window)], segments)[0]
    assert _error(found, expected) < TOLERANCE
    assert _error(found, _engine_logits(checkpoint, window, compose=False)) > 10 * TOLERANCE


def test_an_encoding_acts_as_in_the_engine(rig: Rig, checkpoint: Path, segments: list[CapturedSegment]) -> None:
    """Far nearer to the engine's logits under it than exact states are; sums in another order may round a value elsewhere."""
    stored = [segment.stored_as(COMPACT) for segment in segments]
    setting = Setting(Mode.COMPOSE, Prime.START, WINDOW)
    encoded = _engine_logits(checkpoint, WINDOW, compose=True, encoding=COMPACT)
    exact = _error(_logits(rig, [setting], segments)[0], encoded)
    assert exact > 10 * TOLERANCE
    assert _error(_logits(rig, [setting], stored)[0], encoded) < 0.2 * exact


def test_off_equals_the_engines_full_recompute_alone_and_in_a_batch(
    rig: Rig, checkpoint: Path, segments: list[CapturedSegment]
) -> None:
    expected = _engine_logits(checkpoint, WINDOW, compose=False)
    alone = _logits(rig, [Setting(Mode.OFF)], segments)[0]
    batched = _logits(rig, [Setting(Mode.COMPOSE, Prime.START, WINDOW), Setting(Mode.OFF)], segments)[1]
    assert _error(alone, expected) < TOLERANCE
    assert _error(batched, expected) < TOLERANCE


@pytest.mark.parametrize("variant", [llama.VARIANTS[0], minimax.VARIANTS[0]], ids=["no states", "one decay a head"])
def test_models_whose_transitions_are_none_or_numbers(variant: Variant, checkpoints: CheckpointFactory) -> None:
    """Bodies are keys and values alone, or a transition scales; live, composed and recomputed prompts are the engine's."""
    checkpoint = checkpoints.directory(variant)
    rig = Rig(checkpoint, "cpu", 20_000, 64)
    with torch.inference_mode():
        primes = [_primed(rig)] * len(LENGTHS)
        segments = capture_segments(rig, PROMPT.documents, primes, CapturePlan((SeamWindow(SEAM), SeamWindow(16))))
    settings = [Setting(Mode.COMPOSE, Prime.START, SeamWindow(SEAM)), Setting(Mode.OFF)]
    composed, recomputed = _logits(rig, settings, segments)
    assert _error(composed, _engine_logits(checkpoint, SeamWindow(SEAM), compose=True)) < TOLERANCE
    assert _error(recomputed, _engine_logits(checkpoint, SeamWindow(SEAM), compose=False)) < TOLERANCE
    assert _error(composed, recomputed) > 10 * TOLERANCE


def test_ablations_all_differ(rig: Rig, segments: list[CapturedSegment]) -> None:
    modes = (Mode.ADDITION, Mode.TRANSITION, Mode.TRANSITION_ROPE, Mode.LAST_STATE, Mode.TAIL_REPLAY)
    logits = _logits(rig, [Setting(mode) for mode in modes], segments)
    compose = _logits(rig, [Setting(Mode.COMPOSE, Prime.START, SeamWindow(0))], segments)[0]
    for first in range(len(modes)):
        for second in range(first):
            assert _error(logits[first], logits[second]) > 10 * TOLERANCE, (modes[first], modes[second])
    # With true positions and the transition applied, nothing but the seam is left to add.
    assert _error(logits[modes.index(Mode.TRANSITION_ROPE)], compose) < TOLERANCE


def _refresh_layout(
    rig: Rig, segments: list[CapturedSegment], blocks: Sequence[Sequence[range]], replay: int
) -> Layout:
    refresh = Refresh(Selection.FIRST_LAYER, 1.0, PAGE_TOKENS, replay)
    setting = Setting(Mode.COMPOSE, Prime.START, WINDOW, refresh=refresh)
    return lay_out(rig, PROMPT, setting, segments, Refreshed(tuple(tuple(own) for own in blocks)), reserve=8)


def test_refresh_of_every_block_differs_from_recompute_only_by_the_state_that_follows(
    rig: Rig, segments: list[CapturedSegment]
) -> None:
    """The first document's renewed keys are exact: every earlier token is live and its head state is the true one."""
    layout = _refresh_layout(rig, segments, [[range(SEAM, LENGTHS[0])], [], []], replay=0)
    plain = lay_out(rig, PROMPT, Setting(Mode.OFF), [], None, reserve=8)
    PromptBatch(rig, [layout]).combine()
    found = _keys(rig, layout, range(len(PROMPT.opening), len(PROMPT.opening) + LENGTHS[0]))
    PromptBatch(rig, [plain]).combine()
    expected = _keys(rig, plain, range(len(PROMPT.opening), len(PROMPT.opening) + LENGTHS[0]))
    assert _error(found, expected) < TOLERANCE


def _engine_refresh(
    checkpoint: Path, blocks: Sequence[Sequence[range]] | None
) -> tuple[torch.Tensor, tuple[tuple[range, ...], ...], torch.Tensor]:
    """The engine's logits with these blocks, or with the four that it chooses; with the blocks, and the attention."""
    memory = DeviceMemory(torch.device("cpu"), torch.float32, 200, 16, 4)
    model = load_checkpoint(checkpoint, memory)
    context = EngineContext.create(model, memory, CaptureProfile(WINDOW, PRIME), 1 << 30)
    with torch.inference_mode():
        states = _finish(CapturePass(context, PROMPT.documents, capture_prime(context)).run())
        documents = [CombinePart(ids, state) for ids, state in zip(PROMPT.documents, states, strict=True)]
        parts = (CombinePart(PROMPT.opening), *documents, CombinePart(PROMPT.closing))
        one = CombinePass(context, CombinePlan(None, parts, 4, refresh_tokens=sum(LENGTHS)))
        attending = AttendingRows(context, one, question_tokens(one.plan))
        _finish(Sweep(context, [attending]).run())
        chosen = choose(one.plan, RefreshOrder(4), renewal_scores(one.plan, attending.attention).tolist(), 0.0)
        if blocks is not None:
            chosen = Refreshed(((), *(tuple(own) for own in blocks), ()))
        one.refresh(refresh_plan(one.plan, chosen))
        rows = RefreshedRows(context, one)
        _finish(Sweep(context, [rows]).run())
        return rows.finish()[0], chosen.blocks[1:-1], attending.attention


BLOCKS: Sequence[Sequence[Sequence[range]]] = (
    [[range(24, 40)], [], []],
    [[], [range(SEAM, 24), range(40, 56)], [range(72, 97)]],
    [[range(16, 24), range(32, 40)], [range(48, 63)], [range(SEAM, 16)]],
)


@pytest.mark.parametrize("blocks", BLOCKS)
def test_refreshed_blocks_give_the_engines_logits(
    rig: Rig, checkpoint: Path, segments: list[CapturedSegment], blocks: Sequence[Sequence[range]]
) -> None:
    expected, *_ = _engine_refresh(checkpoint, blocks)
    found = PromptBatch(rig, [_refresh_layout(rig, segments, blocks, replay=8)]).combine()[0]
    assert _error(found, expected) < 1e-4
    plain = PromptBatch(rig, [_refresh_layout(rig, segments, [[], [], []], replay=8)]).combine()[0]
    bare = PromptBatch(rig, [_refresh_layout(rig, segments, blocks, replay=0)]).combine()[0]
    assert min(_error(plain, expected), _error(bare, expected)) > 1e-3


def test_both_choose_the_same_blocks(rig: Rig, checkpoint: Path, segments: list[CapturedSegment]) -> None:
    _, blocks, attention = _engine_refresh(checkpoint, None)
    refresh = Refresh(Selection.SERVED, 0.0, 16, 8)
    found: list[torch.Tensor] = []

    def watch(mixer: Mixer, normed: torch.Tensor, batch: CombineBatch) -> None:
        if isinstance(mixer, PagedAttention):
            found.extend(question_attention(mixer, normed, batch, [len(PROMPT.closing)]))

    plain = lay_out(rig, PROMPT, Setting(Mode.COMPOSE, Prime.START, WINDOW), segments, None, reserve=8)
    PromptBatch(rig, [plain]).combine(None, watch)
    total = torch.stack(found).sum(0)
    assert _error(total, attention) < 1e-4
    attended = by_document(PROMPT, total.tolist())
    scores = [reached(*own, Setting(Mode.COMPOSE, Prime.START, WINDOW)) for own in zip(segments, attended, strict=True)]
    counts = []
    for share in range(1, 101):
        setting = Setting(Mode.COMPOSE, Prime.START, WINDOW, refresh=replace(refresh, live_share=share / 100))
        chosen = choose_blocks(PROMPT, setting, segments, [scores], seed=0)
        counts.append(sum(-(-len(own) // 16) for document in chosen.blocks for own in document))
        if chosen.blocks == blocks:
            return
    raise AssertionError(f"{blocks} is none of the choices, of {sorted(set(counts))} blocks")


def test_a_block_from_a_decayed_state_is_close_and_replay_brings_it_closer(
    rig: Rig, segments: list[CapturedSegment]
) -> None:
    block = range(len(PROMPT.opening) + 24, len(PROMPT.opening) + 40)
    plain = lay_out(rig, PROMPT, Setting(Mode.OFF), [], None, reserve=8)
    PromptBatch(rig, [plain]).combine()
    expected = _keys(rig, plain, block)
    errors = []
    for replay in (0, 8, 16):
        layout = _refresh_layout(rig, segments, [[range(24, LENGTHS[0])], [], []], replay)
        PromptBatch(rig, [layout]).combine()
        errors.append(_error(_keys(rig, layout, block), expected))
    # Sixteen replayed tokens reach back to the seam, where the state is known exactly.
    assert errors[2] < TOLERANCE < errors[1] < errors[0]


def _keys(rig: Rig, layout: Layout, positions: range) -> torch.Tensor:
    """Freshly written keys of the last attention layer at true positions."""
    slots = dict(zip(layout.positions, layout.write_slots, strict=True))
    return rig.memory.page_pools[-1].keys.flatten(0, 1)[[slots[place] for place in positions]].clone()


def test_live_tokens_are_counted(rig: Rig, segments: list[CapturedSegment]) -> None:
    layout = _refresh_layout(rig, segments, [[], [range(24, 32), range(40, 48)], []], replay=8)
    # Two blocks of eight with eight replayed before each: the second replay follows the first block.
    assert layout.live_document_tokens == 3 * SEAM + 32
    tail = lay_out(rig, PROMPT, Setting(Mode.COMPOSE, Prime.START, WINDOW, tail_tokens=8), segments, None, reserve=8)
    bodies = [(length - 8) // PAGE_TOKENS * PAGE_TOKENS for length in LENGTHS]
    assert tail.live_document_tokens == sum(SEAM + length - end for length, end in zip(LENGTHS, bodies, strict=True))
