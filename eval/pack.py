"""One pack of questions under all settings: captures once a prime, the reference once, settings in batches."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from eval.batch import PromptBatch
from eval.capture import CapturedSegment, CapturePlan, PrimeState, capture_segments
from eval.layout import Layout, lay_out
from eval.prompts import AnswerReader, EvalPrompt
from eval.refresh import choose_blocks, seam_tokens
from eval.rig import Rig
from eval.scoring import Outcome, Reference, Scores, find_references, score_batch
from eval.settings import Mode, Prime, Selection, Setting
from eval.token_scores import COMPARED_PRIMES, Captures, by_document, prime_changes, reached
from services.blob.encodings import StateEncoding
from services.worker.engine.question import question_attention
from services.worker.engine.refresh import Refreshed, TokenScores
from services.worker.mixers.batch import CombineBatch, Mixer
from services.worker.mixers.paged_attention import PagedAttention

__all__ = ["BatchLimits", "NumberedPrompt", "PackRunner"]

PassWatcher = Callable[[int, float], None]


@dataclass(frozen=True, slots=True)
class NumberedPrompt:
    """A question with its number in the set."""

    number: int
    prompt: EvalPrompt


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """At most so many live tokens run through the layers at once, in so many state slots."""

    live_tokens: int
    slots: int


@dataclass(frozen=True, slots=True)
class _Job:
    row: int
    setting: Setting


@dataclass(slots=True)
class _Pack:
    """What is known of the running pack. scores: of every document's tokens, by row and selection pass.

    encoded: segments as an encoding gives them back, by row.
    """

    prompts: Sequence[NumberedPrompt]
    captures: Captures = field(default_factory=dict)
    references: list[Reference] = field(default_factory=list)
    scores: dict[tuple[int, str], TokenScores] = field(default_factory=dict)
    encoded: dict[tuple[int, Prime, StateEncoding], list[CapturedSegment]] = field(default_factory=dict)

    def segments(self, row: int, setting: Setting) -> list[CapturedSegment]:
        """A prompt's segments as a setting stores them."""
        captured = self.captures[setting.prime][row]
        if setting.encoding.is_exact:
            return captured
        key = (row, setting.prime, setting.encoding)
        if key not in self.encoded:
            self.encoded[key] = [segment.stored_as(setting.encoding) for segment in captured]
        return self.encoded[key]


class PackRunner:
    """Runs packs on one rig. fixed_primes: token ids of the primes that do not depend on the prompt; watch: told of every pass
    behind which logits stand how many live tokens and seconds it took.
    """

    def __init__(
        self,
        rig: Rig,
        reader: AnswerReader,
        settings: Sequence[Setting],
        fixed_primes: Mapping[Prime, tuple[int, ...]],
        limits: BatchLimits,
        watch: PassWatcher | None = None,
    ) -> None:
        self._rig = rig
        self._reader = reader
        self._settings = [setting for setting in settings if setting.mode is not Mode.OFF]
        self._fixed_primes = fixed_primes
        self._limits = limits
        self._watch = watch

    @torch.inference_mode()
    def run(self, prompts: Sequence[NumberedPrompt]) -> list[Outcome]:
        """Every question under full recompute and under all settings."""
        self._rig.arena.rewind(0)
        pack = _Pack(prompts)
        for prime in {
            setting.prime for setting in self._settings if not setting.mode.recomputes
        } | self._extra_primes():
            pack.captures[prime] = self._capture(prompts, prime)
        outcomes = self._run_reference(pack)
        self._score_tokens(pack)
        jobs = [_Job(row, setting) for setting in self._settings for row in range(len(prompts))]
        for batch_jobs, layouts in self._batches(pack, jobs):
            batch = PromptBatch(self._rig, layouts)
            logits = self._timed(layouts, partial(self._combine, pack, batch_jobs, batch))
            scores = score_batch(
                self._reader,
                [prompts[job.row].prompt for job in batch_jobs],
                [pack.references[job.row] for job in batch_jobs],
                batch,
                logits,
            )
            for job, layout, own in zip(batch_jobs, layouts, scores, strict=True):
                looked = self._looked(pack, job)
                outcomes.append(_outcome(prompts[job.row], job.setting, own, layout, looked))
        return outcomes

    def _extra_primes(self) -> set[Prime]:
        """Primes that a selection compares."""
        compared = any(str(Selection.PRIME_CHANGE) in _scores_keys(own) for own in self._settings)
        return set(COMPARED_PRIMES) if compared else set()

    def _capture(self, prompts: Sequence[NumberedPrompt], prime: Prime) -> list[list[CapturedSegment]]:
        documents = [document for own in prompts for document in own.prompt.documents]
        states: list[PrimeState | None]
        if prime is Prime.NONE:
            states = [None] * len(documents)
        elif prime in self._fixed_primes:
            states = self._prime_states([self._fixed_primes[prime]]) * len(documents)
        else:
            own_states = self._prime_states([own.prompt.opening for own in prompts])
            states = [state for own, state in zip(prompts, own_states, strict=True) for _ in own.prompt.documents]
        segments = iter(capture_segments(self._rig, documents, states, self._plan(prime)))
        return [[next(segments) for _ in own.prompt.documents] for own in prompts]

    def _prime_states(self, primes: Sequence[tuple[int, ...]]) -> list[PrimeState | None]:
        layouts = []
        for token_ids in primes:
            layout = Layout(self._rig)
            layout.add_live(token_ids)
            layouts.append(layout)
        batch = PromptBatch(self._rig, layouts)
        batch.combine()
        return [
            PrimeState(len(token_ids), batch.snapshots(index), tuple(layout.rows))
            for index, (token_ids, layout) in enumerate(zip(primes, layouts, strict=True))
        ]

    def _plan(self, prime: Prime) -> CapturePlan:
        own = [setting for setting in self._settings if setting.prime is prime]
        return CapturePlan(
            tuple(dict.fromkeys(setting.seam_window for setting in own)),
            tuple(sorted({setting.tail_tokens for setting in own if setting.tail_tokens})),
        )

    def _run_reference(self, pack: _Pack) -> list[Outcome]:
        outcomes: list[Outcome] = []
        setting = Setting(Mode.OFF)
        for jobs, layouts in self._batches(pack, [_Job(row, setting) for row in range(len(pack.prompts))]):
            batch = PromptBatch(self._rig, layouts)
            logits = self._timed(layouts, batch.combine)
            own_prompts = [pack.prompts[job.row] for job in jobs]
            texts = [own.prompt for own in own_prompts]
            references = find_references(self._reader, texts, batch, logits)
            batch.restore()
            scores = score_batch(self._reader, texts, references, batch, logits)
            pack.references += references
            outcomes += [
                _outcome(own, setting, score, layout)
                for own, score, layout in zip(own_prompts, scores, layouts, strict=True)
            ]
        return outcomes

    def _score_tokens(self, pack: _Pack) -> None:
        """For every refresh: how much each document token wants renewal."""
        wanted = {key: own for own in self._settings for key in _scores_keys(own)}
        for key, setting in wanted.items():
            if key == Selection.PRIME_CHANGE:
                for row in range(len(pack.prompts)):
                    pack.scores[row, key] = prime_changes(self._rig, pack.captures, row)
                continue
            plain = Setting(setting.mode, setting.prime, setting.seam_window, setting.tail_tokens)
            for jobs, layouts in self._batches(pack, [_Job(row, plain) for row in range(len(pack.prompts))]):
                self._attend(pack, jobs, layouts, key)

    def _looked(self, pack: _Pack, job: _Job) -> float:
        """Tokens of the pass that looks for a refresh's blocks, by its share of the layers."""
        keys = [key for key in _scores_keys(job.setting) if key != Selection.PRIME_CHANGE]
        if not keys:
            return 0.0
        prompt = pack.prompts[job.row].prompt
        seams = seam_tokens(job.setting, pack.segments(job.row, job.setting))
        tokens = len(prompt.opening) + seams + len(prompt.closing)
        return tokens * self._depth(keys[0]) / len(self._rig.model.layers)

    def _depth(self, key: str) -> int:
        """Layers in which the question's attention is looked at: up to the last or the first full-attention layer."""
        kinds = [isinstance(layer.mixer, PagedAttention) for layer in self._rig.model.layers]
        every = key.startswith((Selection.ALL_LAYERS, Selection.SERVED))
        return len(kinds) - kinds[::-1].index(True) if every else kinds.index(True) + 1

    def _attend(self, pack: _Pack, jobs: Sequence[_Job], layouts: Sequence[Layout], key: str) -> None:
        sums: list[torch.Tensor] = []
        lengths = [len(pack.prompts[job.row].prompt.closing) for job in jobs]

        def watch(mixer: Mixer, normed: torch.Tensor, batch: CombineBatch) -> None:
            if isinstance(mixer, PagedAttention):
                masses = question_attention(mixer, normed, batch, lengths)
                sums[:] = [old + new for old, new in zip(sums, masses, strict=True)] if sums else masses

        PromptBatch(self._rig, layouts).combine(self._depth(key), watch)
        for job, mass in zip(jobs, sums, strict=True):
            scores = by_document(pack.prompts[job.row].prompt, mass.tolist())
            if key.startswith(Selection.SERVED):
                segments = pack.segments(job.row, job.setting)
                scores = [reached(*own, job.setting) for own in zip(segments, scores, strict=True)]
            pack.scores[job.row, key] = scores

    def _combine(self, pack: _Pack, jobs: Sequence[_Job], batch: PromptBatch) -> torch.Tensor:
        """Logits behind the prompts; with `exact` the prompt goes on from the state behind its opening."""
        logits = batch.combine()
        if jobs[0].setting.mode is not Mode.EXACT:
            return logits
        prompts = [pack.prompts[job.row].prompt for job in jobs]
        return batch.advance([[*(t for d in own.documents for t in d), *own.closing] for own in prompts])

    def _timed(self, layouts: Sequence[Layout], run: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._watch is None:
            return run()
        self._wait_for_device()
        began = time.perf_counter()
        logits = run()
        self._wait_for_device()
        self._watch(sum(len(layout.token_ids) for layout in layouts), time.perf_counter() - began)
        return logits

    def _wait_for_device(self) -> None:
        if self._rig.device.type == "cuda":
            torch.cuda.synchronize(self._rig.device)

    def _batches(self, pack: _Pack, jobs: Sequence[_Job]) -> Iterator[tuple[list[_Job], list[Layout]]]:
        """Jobs with their layouts, as many at once as the limits allow; `exact` keeps to itself."""
        mark = self._rig.arena.mark()
        taken: list[_Job] = []
        layouts: list[Layout] = []
        tokens = slots = 0
        for job in jobs:
            layout = self._lay_out(pack, job)
            alone = bool(taken) and (job.setting.mode is Mode.EXACT) != (taken[-1].setting.mode is Mode.EXACT)
            size, room = len(layout.token_ids), 1 + len(layout.sides)
            if job.setting.mode is Mode.EXACT:
                size += layout.live_document_tokens
            full = tokens + size > self._limits.live_tokens or slots + room > self._limits.slots
            if taken and (full or alone):
                yield taken, layouts
                self._rig.arena.rewind(mark)
                taken, layouts, tokens, slots = [], [], 0, 0
                layout = self._lay_out(pack, job)
            taken.append(job)
            layouts.append(layout)
            tokens, slots = tokens + size, slots + room
        if taken:
            yield taken, layouts
        self._rig.arena.rewind(mark)

    def _lay_out(self, pack: _Pack, job: _Job) -> Layout:
        own, setting = pack.prompts[job.row], job.setting
        segments = [] if setting.mode.recomputes else pack.segments(job.row, setting)
        refreshed: Refreshed | None = None
        if setting.refresh is not None:
            orders = [pack.scores[job.row, key] for key in _scores_keys(setting)]
            refreshed = choose_blocks(own.prompt, setting, segments, orders, seed=own.number)
        return lay_out(self._rig, own.prompt, setting, segments, refreshed, self._reader.answer_limit)


def _scores_keys(setting: Setting) -> tuple[str, ...]:
    """The orders of tokens that a setting's refresh draws from; settings with the same key share the pass behind it."""
    if setting.refresh is None:
        return ()
    selection = setting.refresh.selection
    if selection is Selection.PRIME_CHANGE:
        return (str(selection),)
    kind = selection if selection in (Selection.ALL_LAYERS, Selection.SERVED) else Selection.FIRST_LAYER
    attended = f"{kind} {setting.prime} {setting.seam_window} {setting.tail_tokens}"
    return (attended, str(Selection.PRIME_CHANGE)) if selection is Selection.BOTH else (attended,)


def _outcome(own: NumberedPrompt, setting: Setting, scores: Scores, layout: Layout, looked: float = 0.0) -> Outcome:
    """looked: tokens of the pass that looks for blocks, by its share of the layers."""
    run = len(layout.token_ids) + looked if not setting.mode.recomputes else len(own.prompt.token_ids)
    return Outcome(
        question=own.number,
        setting=setting.name,
        scores=scores,
        live_tokens=layout.live_document_tokens,
        document_tokens=own.prompt.document_tokens,
        run_share=run / len(own.prompt.token_ids),
    )
