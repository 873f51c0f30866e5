"""Exact match under greedy decoding, by teacher forcing.

A reply is exactly what greedy decoding yields when every token of it, the end included, is the
likeliest one after the tokens before it; so one forward pass scores a whole question.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from train.data import Question, Source
from train.data.prompts import PromptEncoder
from train.network import Network

SCORE_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Encoded:
    """A question's prompt and expected reply as ids, and the group it is counted in."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    group: str


def encode_questions(tokenizer_file: Path, asked: Sequence[Question]) -> list[Encoded]:
    """Questions that fit the scoring length, grouped by type; the Factbook apart."""
    encoder = PromptEncoder(tokenizer_file)
    encoded: list[Encoded] = []
    for question in asked:
        prompt = encoder.prompt(question.system, question.documents, question.question).ids
        reply = tuple(encoder.reply(question.answer))
        fiction = question.source is Source.FICTION
        group = question.type.value if fiction else question.source.value
        if len(prompt) + len(reply) <= SCORE_LENGTH:
            encoded.append(Encoded(prompt, reply, group))
    return encoded


def exact_match(
    network: Network, encoded: Sequence[Encoded], tokens: int, length: int = SCORE_LENGTH
) -> dict[str, float]:
    """Share of exactly right replies by group, and `all`."""
    rows = tokens // length
    right: dict[str, list[bool]] = defaultdict(list)
    for start in range(0, len(encoded), rows):
        batch = encoded[start : start + rows]
        for item, correct in zip(batch, _score(network, batch, rows, length), strict=True):
            right[item.group].append(correct)
            right["all"].append(correct)
    return {group: sum(values) / len(values) for group, values in sorted(right.items())}


def _score(network: Network, batch: Sequence[Encoded], rows: int, length: int) -> list[bool]:
    device = network.weights["embed"].device
    ids = torch.zeros(rows, length, dtype=torch.long)
    for row, item in enumerate(batch):
        whole = item.prompt + item.reply
        ids[row, : len(whole)] = torch.tensor(whole)
    position = torch.arange(length).repeat(rows).to(device)
    hidden = network.hidden(ids.flatten().to(device), position, rows, keep=False)
    results: list[bool] = []
    for row, item in enumerate(batch):
        first = row * length + len(item.prompt) - 1
        best = network.best_next(hidden[first : first + len(item.reply)])
        results.append(best.tolist() == list(item.reply))
    return results
