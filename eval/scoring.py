"""Answers of a batch of prompts against the reference answers of a full recompute."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eval.batch import PromptBatch
from eval.prompts import AnswerReader, EvalPrompt, token_f1

__all__ = ["Outcome", "Reference", "Scores", "find_references", "score_batch"]


@dataclass(frozen=True, slots=True)
class Reference:
    """The greedy answer of a full recompute and its log-probabilities `[n, vocabulary]` at every answer token."""

    answer: tuple[int, ...]
    log_probs: torch.Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """One answer. divergence: KL from the reference's distribution, the mean over its answer tokens, in nats.

    first_divergence: that of the first answer token alone.
    """

    answer: str
    exact: bool
    f1: float
    agrees: bool
    divergence: float
    first_divergence: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One question under one setting.

    run_share: tokens that run ahead of the answer, over those of a full recompute; a pass that looks for blocks to refresh
    counts by its share of the layers.
    """

    question: int
    setting: str
    scores: Scores
    live_tokens: int
    document_tokens: int
    run_share: float = 1.0


def find_references(
    reader: AnswerReader, prompts: Sequence[EvalPrompt], batch: PromptBatch, first_logits: torch.Tensor
) -> list[Reference]:
    """Greedy answers of a batch that recomputes: the expected one where greedy decoding gives it, else decoded."""
    batch.save()
    answers = [prompt.answer for prompt in prompts]
    logits = _along(batch, first_logits, answers)
    wrong = [index for index, own in enumerate(answers) if tuple(logits[index].argmax(-1).tolist()) != own]
    if wrong:
        for index, answer in zip(wrong, _decode(reader, batch, wrong, first_logits), strict=True):
            answers[index] = answer
        batch.restore()
        logits = _along(batch, first_logits, answers)
    return [Reference(answer, own.log_softmax(-1)) for answer, own in zip(answers, logits, strict=True)]


def score_batch(
    reader: AnswerReader,
    prompts: Sequence[EvalPrompt],
    references: Sequence[Reference],
    batch: PromptBatch,
    first_logits: torch.Tensor,
) -> list[Scores]:
    """Every prompt's answer; decoding is needed only where it leaves the reference."""
    batch.save()
    logits = torch.cat(_along(batch, first_logits, [reference.answer for reference in references]))
    expected = torch.cat([reference.log_probs for reference in references])
    lengths = [len(reference.answer) for reference in references]
    divergences = (expected.exp() * (expected - logits.log_softmax(-1))).sum(-1).cpu().split(lengths)
    chosen = logits.argmax(-1).cpu().split(lengths)
    answers = [tuple(own.tolist()) for own in chosen]
    differing = [index for index, own in enumerate(answers) if own != references[index].answer]
    if differing:
        for index, answer in zip(differing, _decode(reader, batch, differing, first_logits), strict=True):
            answers[index] = answer
    return [
        _judge(reader, prompt, answer, reference, own)
        for prompt, answer, reference, own in zip(prompts, answers, references, divergences, strict=True)
    ]


def _along(batch: PromptBatch, first_logits: torch.Tensor, answers: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits that predict each token of the answers."""
    return [torch.cat([first[None], own[:-1]]) for first, own in zip(first_logits, batch.extend(answers), strict=True)]


def _decode(
    reader: AnswerReader, batch: PromptBatch, indices: Sequence[int], first_logits: torch.Tensor
) -> list[tuple[int, ...]]:
    batch.restore()
    first_tokens = first_logits.argmax(-1).tolist()
    return batch.greedy(indices, [first_tokens[index] for index in indices], reader.end_id, reader.answer_limit)


def _judge(
    reader: AnswerReader, prompt: EvalPrompt, answer: tuple[int, ...], reference: Reference, divergences: torch.Tensor
) -> Scores:
    text = reader.text(answer)
    return Scores(
        answer=text,
        exact=prompt.accepts(text),
        f1=token_f1(text, prompt.acceptable),
        agrees=answer == reference.answer,
        divergence=float(divergences.mean()),
        first_divergence=float(divergences[0]),
    )
