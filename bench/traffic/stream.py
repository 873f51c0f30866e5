"""Requests of a workload, from its seed alone: what they are made of, and when they come. No text yet."""

import itertools
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench.traffic.lengths import Quantiles
from bench.traffic.workload import Workload

__all__ = ["Piece", "Removal", "TrafficRequest", "TrafficStream", "Turn"]

# Names of runs of the system prompt that nobody has again begin so.
_ONCE = "once"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of text. Two of one name and version are the same text; documents alone have further versions."""

    name: str
    tokens: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the user with its documents ahead of the text, and the reply that is to stand behind it in later requests."""

    documents: tuple[Piece, ...]
    question: Piece
    reply: Piece


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """at: seconds from the start of its draw; system: runs of the system prompt; turns: the last one is asked now."""

    at: float
    tenant: str
    system: tuple[Piece, ...]
    turns: tuple[Turn, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The prompt in order."""
        asked = [*self.system]
        for turn in self.turns:
            asked += [*turn.documents, turn.question, turn.reply]
        return tuple(asked[:-1])

    @property
    def prompt_tokens(self) -> int:
        """Of all its pieces, without what the template adds."""
        return sum(piece.tokens for piece in self.pieces)

    @property
    def answer_tokens(self) -> int:
        """How long the reply is to be."""
        return self.turns[-1].reply.tokens


@dataclass(frozen=True, slots=True)
class Removal:
    """At this moment a document of a tenant has another text, or is gone: what is stored of it must fall."""

    at: float
    tenant: str
    name: str


@dataclass(slots=True)
class _Talk:
    since: float
    tenant: str
    system: tuple[Piece, ...]
    turns: tuple[Turn, ...]


class TrafficStream:
    """Goes on from draw to draw: documents change and conversations grow with the time that draws cover.

    The same calls give the same requests.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._source = random.Random(workload.seed)
        self._serial = itertools.count()
        self._now = 0.0
        self._tenants = [f"tenant-{index}" for index in range(workload.tenants.count)]
        self._cast = self._tenant_weights()
        corpus = workload.corpus
        self._ranks = list(itertools.accumulate(1 / (rank + 1) ** corpus.zipf for rank in range(corpus.documents)))
        self._corpora = [
            [self._new_document(tenant) for _ in range(corpus.documents)] for tenant in range(workload.tenants.count)
        ]
        self._layers = [
            [Piece(f"system-{number}-{variant}", layer.tokens.draw(self._source)) for variant in range(layer.variants)]
            for number, layer in enumerate(workload.system)
        ]
        self._layer_ranks = [
            list(itertools.accumulate(1 / (rank + 1) ** layer.zipf for rank in range(layer.variants)))
            for layer in workload.system
        ]
        self._talks: deque[_Talk] = deque()
        # Ranks of the last documents that were asked for, by tenant.
        self._recent: list[deque[int]] = [deque(maxlen=workload.request.recent_uses) for _ in self._tenants]

    def draw(self, rate: float, seconds: float) -> list[TrafficRequest | Removal]:
        """What happens in so many seconds at a rate of requests a second, by time from this draw's start."""
        events: list[TrafficRequest | Removal] = [*self._removals_and_requests(rate, seconds)]
        self._now += seconds
        return events

    def take(self, count: int, rate: float = 1.0) -> list[TrafficRequest]:
        """So many requests, whatever time they cover at a rate."""
        found: list[TrafficRequest] = []
        while len(found) < count:
            drawn = self.draw(rate, max(1.0, (count - len(found)) / rate))
            found += [own for own in drawn if isinstance(own, TrafficRequest)]
        return found[:count]

    def _removals_and_requests(self, rate: float, seconds: float) -> Iterator[TrafficRequest | Removal]:
        changes = deque(self._change_times(seconds))
        for at in self._arrival_times(rate, seconds):
            while changes and changes[0] <= at:
                yield self._change(changes.popleft())
            yield self._request(at)
        for at in changes:
            yield self._change(at)

    def _arrival_times(self, rate: float, seconds: float) -> Iterator[float]:
        arrivals = self._workload.arrivals
        at = 0.0
        while (at := at + self._source.expovariate(rate / arrivals.burst)) < seconds:
            yield at
            while self._source.random() < 1 - 1 / arrivals.burst:
                yield at

    def _change_times(self, seconds: float) -> Iterator[float]:
        corpus = self._workload.corpus
        share = corpus.updates_per_minute + corpus.births_per_minute
        rate = share * corpus.documents * len(self._tenants) / 60
        at = 0.0
        while rate and (at := at + self._source.expovariate(rate)) < seconds:
            yield at

    def _change(self, at: float) -> Removal:
        corpus = self._workload.corpus
        tenant = self._source.randrange(len(self._tenants))
        rank = self._source.randrange(corpus.documents)
        old = self._corpora[tenant][rank]
        is_update = self._source.random() * (corpus.updates_per_minute + corpus.births_per_minute) < (
            corpus.updates_per_minute
        )
        new = replace(old, version=old.version + 1) if is_update else self._new_document(tenant)
        self._corpora[tenant][rank] = new
        return Removal(at, self._tenants[tenant], old.name)

    def _request(self, at: float) -> TrafficRequest:
        talk = self._continued(self._now + at) or self._new_talk()
        system = tuple(self._new(_ONCE, own.tokens) if own.name.startswith(_ONCE) else own for own in talk.system)
        is_first = not talk.turns
        documents = self._documents(talk.tenant) if is_first or self._has_own_documents else ()
        shape = self._workload.request
        asked = shape.question_tokens if is_first else self._later_questions
        question = self._new("question", asked.draw(self._source))
        reply = self._new("reply", shape.answer_tokens.draw(self._source))
        # Documents beside a question leave the history with the next one.
        history = tuple(replace(turn, documents=()) for turn in talk.turns) if self._has_own_documents else talk.turns
        request = TrafficRequest(at, talk.tenant, system, (*history, Turn(documents, question, reply)))
        if self._workload.conversations is not None:
            self._talks.append(_Talk(self._now + at, talk.tenant, talk.system, request.turns))
        return request

    @property
    def _later_questions(self) -> Quantiles:
        talks = self._workload.conversations
        return (talks and talks.question_tokens) or self._workload.request.question_tokens

    @property
    def _has_own_documents(self) -> bool:
        return self._workload.request.place == "question"

    def _continued(self, now: float) -> _Talk | None:
        """The conversation that has waited longest, where this request goes on with one."""
        talks = self._workload.conversations
        if talks is None or self._source.random() >= talks.share:
            return None
        while self._talks and self._talks[0].since + talks.gap_seconds <= now:
            talk = self._talks.popleft()
            told = TrafficRequest(0.0, talk.tenant, talk.system, talk.turns)
            grown = told.prompt_tokens + told.answer_tokens + self._later_questions.at(1.0)
            if grown <= talks.most_tokens:
                return talk
        return None

    def _new_talk(self) -> _Talk:
        tenant = self._source.choices(self._tenants, cum_weights=self._cast)[0]
        system = []
        for number, layer in enumerate(self._workload.system):
            if self._source.random() >= layer.new_share:
                system.append(self._source.choices(self._layers[number], cum_weights=self._layer_ranks[number])[0])
            else:
                system.append(self._new(_ONCE, layer.tokens.draw(self._source)))
        return _Talk(self._now, tenant, tuple(system), ())

    def _documents(self, tenant: str) -> tuple[Piece, ...]:
        shape = self._workload.request
        if self._source.random() >= shape.share_with_documents:
            return ()
        index = self._tenants.index(tenant)
        corpus, recent = self._corpora[index], self._recent[index]
        wanted = shape.documents.draw(self._source)
        ranks: dict[int, None] = {}
        while len(ranks) < wanted:
            ranks[self._rank(recent)] = None
        chosen = list(ranks)
        recent += chosen
        if shape.order == "ranked":
            chosen.sort()
        documents = [corpus[rank] for rank in chosen]
        if shape.order == "shuffled":
            self._source.shuffle(documents)
        elif shape.order == "named":
            documents.sort(key=lambda own: own.name)
        return tuple(documents)

    def _rank(self, recent: Sequence[int]) -> int:
        # Not much beyond what one request takes: else it would never find another document.
        if len(recent) > 64 and self._source.random() < self._workload.request.recent_share:
            return self._source.choice(recent)
        return bisect_left(self._ranks, self._source.random() * self._ranks[-1])

    def _tenant_weights(self) -> list[float]:
        tenants = self._workload.tenants
        if tenants.hot_share is None or tenants.count == 1:
            return list(itertools.accumulate([1.0] * tenants.count))
        quiet = (1 - tenants.hot_share) / (tenants.count - 1)
        return list(itertools.accumulate([tenants.hot_share, *[quiet] * (tenants.count - 1)]))

    def _new_document(self, tenant: int) -> Piece:
        return self._new(f"document-{tenant}", self._workload.corpus.tokens.draw(self._source))

    def _new(self, kind: str, tokens: int) -> Piece:
        return Piece(f"{kind}-{next(self._serial)}", tokens)
