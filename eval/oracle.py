"""Full recompute through the engine's layers and through `transformers`: are the greedy answers the same tokens?"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from eval.batch import PromptBatch
from eval.comparison import Comparison, Difference
from eval.layout import lay_out
from eval.pack import NumberedPrompt
from eval.prompts import ANSWER_LIMIT, PromptReader
from eval.question_sets import QuestionSet
from eval.rig import Rig
from eval.runner import read_share, run_shares
from eval.scoring import Reference, find_references
from eval.settings import Mode, Setting

__all__ = ["Oracle", "OracleOptions", "compare", "compare_answers"]

# Packages whose kernels `transformers` takes wherever it finds them; without them it computes in plain torch.
_KERNEL_PACKAGES = ("fla", "causal_conv1d")


@dataclass(frozen=True, slots=True)
class OracleOptions:
    """Questions in packs of `pack_prompts`, shared out over `workers` processes, each with both models in fp32."""

    checkpoint: Path
    device: str
    questions: QuestionSet
    pack_prompts: int
    workers: int


class Oracle:
    """A checkpoint in `transformers`, fp32, in plain torch on any device."""

    def __init__(self, checkpoint: Path, device: str) -> None:
        model: Any
        with _hidden(_KERNEL_PACKAGES):
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
        self._model = model.to(device).eval()
        self._device = device

    @torch.inference_mode()
    def log_probs(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Log-probabilities `[n, vocabulary]` at every answer token, prompts and answers in one batch.

        Rows are padded on the right, which no token of a causal model sees.
        """
        whole = [(*prompt, *answer) for prompt, answer in zip(prompts, answers, strict=True)]
        token_ids = torch.zeros(len(whole), max(map(len, whole)), dtype=torch.int64)
        for row, tokens in enumerate(whole):
            token_ids[row, : len(tokens)] = torch.tensor(tokens)
        hidden = self._model.model(input_ids=token_ids.to(self._device), use_cache=False).last_hidden_state
        found: list[torch.Tensor] = []
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            rows = hidden[row, len(prompt) - 1 : len(prompt) + len(answer) - 1]
            found.append(self._model.lm_head(rows).log_softmax(-1))
        return found

    def greedy(self, prompt: Sequence[int], begun: Sequence[int], end_id: int) -> tuple[int, ...]:
        """The greedy answer that begins with the tokens `begun`; every token by a full recompute."""
        answer = list(begun)
        while answer[-1] != end_id and len(answer) < ANSWER_LIMIT:
            (log_probs,) = self.log_probs([[*prompt, *answer]], [[end_id]])
            answer.append(int(log_probs[0].argmax()))
        return tuple(answer)


@contextmanager
def _hidden(packages: Sequence[str]) -> Iterator[None]:
    """Imports of some packages fail, as if they were not installed."""
    found = {name: sys.modules[name] for name in packages if name in sys.modules}
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type] # None is how the import system says so
    try:
        yield
    finally:
        for name in packages:
            del sys.modules[name]
        sys.modules.update(found)


def compare_answers(options: OracleOptions) -> list[Comparison]:
    """Every question through both, in order of question."""
    found = run_shares(options.workers, partial(_compare_share, options))
    return sorted(found, key=lambda own: own.question)


def _compare_share(options: OracleOptions, worker: int) -> list[Comparison]:
    # cuDNN computes fp32 convolutions in TF32 unless told otherwise.
    torch.backends.cudnn.allow_tf32 = False
    reader = PromptReader(options.checkpoint)
    oracle = Oracle(options.checkpoint, options.device)
    rig = Rig(
        options.checkpoint, options.device, num_tokens=8_192 * options.pack_prompts, num_slots=options.pack_prompts
    )
    prompts = read_share(reader, [options.questions], worker, options.workers)
    found: list[Comparison] = []
    while pack := list(islice(prompts, options.pack_prompts)):
        found += compare(reader, oracle, pack, _engine_answers(rig, reader, pack))
    return found


@torch.inference_mode()
def _engine_answers(rig: Rig, reader: PromptReader, pack: Sequence[NumberedPrompt]) -> list[Reference]:
    rig.arena.rewind(0)
    layouts = [lay_out(rig, own.prompt, Setting(Mode.OFF), (), None, ANSWER_LIMIT) for own in pack]
    batch = PromptBatch(rig, layouts)
    return find_references(reader, [own.prompt for own in pack], batch, batch.combine())


def compare(
    reader: PromptReader, oracle: Oracle, pack: Sequence[NumberedPrompt], engine: Sequence[Reference]
) -> list[Comparison]:
    """The oracle along the engine's answers: where its likeliest token is another one, it goes on by itself."""
    along = oracle.log_probs([own.prompt.token_ids for own in pack], [own.answer for own in engine])
    return [
        _compare_one(reader, oracle, own, reference, log_probs)
        for own, reference, log_probs in zip(pack, engine, along, strict=True)
    ]


def _compare_one(
    reader: PromptReader, oracle: Oracle, own: NumberedPrompt, engine: Reference, log_probs: torch.Tensor
) -> Comparison:
    chosen = tuple(log_probs.argmax(-1).tolist())
    answer, difference, same = engine.answer, None, len(engine.answer)
    if chosen != engine.answer:
        place = next(place for place, token in enumerate(chosen) if token != engine.answer[place])
        answer = oracle.greedy(own.prompt.token_ids, chosen[: place + 1], reader.end_id)
        difference = _difference(place, engine, log_probs[place], chosen[place])
        same = place + 1
    texts = reader.text(engine.answer), reader.text(answer)
    return Comparison(
        question=own.number,
        type=own.prompt.type,
        engine_answer=texts[0],
        oracle_answer=texts[1],
        engine_exact=own.prompt.accepts(texts[0]),
        oracle_exact=own.prompt.accepts(texts[1]),
        deviation=float((log_probs[:same] - engine.log_probs[:same]).abs().max()),
        difference=difference,
    )


def _difference(place: int, engine: Reference, oracle_row: torch.Tensor, oracle_token: int) -> Difference:
    engine_row, engine_token = engine.log_probs[place], engine.answer[place]
    return Difference(
        place=place,
        engine_margin=float(engine_row[engine_token] - engine_row[oracle_token]),
        oracle_margin=float(oracle_row[oracle_token] - oracle_row[engine_token]),
    )
