"""The state behind a reply: exactly that of the tokens it stands for, held where there is room, and never in anyone's way."""

from dataclasses import dataclass, field

import pytest
import torch

from services.worker.engine.commands import Rename
from services.worker.engine.requests import (
    CaptureSegment,
    FinishedEvent,
    FinishReason,
    GenerateRequest,
    PromptPart,
    Serving,
    SnapshotOrder,
    TurnHeldEvent,
    TurnHold,
)
from services.worker.engine.sampling import SamplingOptions
from services.worker.engine.states import PrefixState
from tests.exactness.rig import assert_close, assert_far, draw_ids
from tests.unit.worker.conftest import EngineFactory
from tests.unit.worker.engine_rig import EngineRig, Heard, live, segment

IDS = draw_ids(60, 1)
NEWLINE = 7
TOLERANCE = 1e-4


@dataclass(slots=True)
class Turn:
    """A prompt whose reply a stop token ends behind a few tokens, as the model draws them."""

    rig: EngineRig
    parts: tuple[PromptPart, ...]
    stop: int = 0
    reply: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        drawn = self.rig.submit("drawn", *self.parts, max_tokens=12)
        self.rig.run()
        at = next(i for i, token in enumerate(drawn.tokens) if i >= 3 and token not in drawn.tokens[:i])
        self.stop, self.reply = drawn.tokens[at], drawn.tokens[:at]

    def submit(self, max_tokens: int = 12, first: int | None = None, key: bytes = b"held") -> Heard:
        """Again, with the stop token, and the state behind it and one token more held."""
        heard = Heard()
        hold = TurnHold(key, (self.stop if first is None else first, NEWLINE))
        options = SamplingOptions(max_tokens, stop_ids=frozenset({self.stop}))
        self.rig.engine.submit(GenerateRequest("turn", self.parts, options, heard.events.append, turn=hold))
        return heard

    @property
    def ids(self) -> tuple[int, ...]:
        """What the held state stands for."""
        return (*(token for part in self.parts for token in part.token_ids), *self.reply, self.stop, NEWLINE)


def _held(heard: Heard) -> TurnHeldEvent | None:
    """The last event, where it is one; it comes behind the reply's own end."""
    if not isinstance(heard.events[-1], TurnHeldEvent):
        return None
    assert isinstance(heard.events[-2], FinishedEvent)
    assert heard.events[-2].holds
    return heard.events[-1]


def _state(rig: EngineRig, key: bytes) -> PrefixState:
    state = rig.context.store.get(key)
    assert isinstance(state, PrefixState)
    return state


def _planes(state: PrefixState) -> list[torch.Tensor]:
    return [plane for one in state.snapshots for plane in (one.state, one.tail)]


def test_a_held_state_is_that_of_its_tokens(rig: EngineRig, make_engine: EngineFactory) -> None:
    turn = Turn(rig, (live(21, 3), live(6, 4)))
    heard = turn.submit()
    rig.run()
    assert _held(heard) is not None
    state = _state(rig, b"held")
    assert state.token_ids == turn.ids
    # Computed in one pass, and as a control up to the token before.
    other = make_engine()
    for key, ids in ((b"whole", turn.ids), (b"short", turn.ids[:-1])):
        other.submit("pass", PromptPart(ids), live(1, 9), snapshots=(SnapshotOrder(key, 1),))
        other.run()
    for mine, whole, short in zip(
        _planes(state), _planes(_state(other, b"whole")), _planes(_state(other, b"short")), strict=True
    ):
        assert_close(mine, whole, TOLERANCE, "a plane of the held state")
        assert_far(mine, short, TOLERANCE)


def test_the_next_turn_goes_on_from_it(rig: EngineRig, make_engine: EngineFactory) -> None:
    rig.capture(CaptureSegment(b"one", IDS))
    turn = Turn(rig, (live(9, 3), segment(b"one", IDS), live(6, 4)))
    heard = turn.submit()
    rig.run()
    held = _held(heard)
    assert held is not None
    assert Rename(b"held", b"kept")(rig.engine) == held.size_bytes > 0
    assert Rename(b"held", b"kept")(rig.engine) == 0
    question = live(5, 8)
    options = SamplingOptions(10, logprobs=5)

    def ask(rig: EngineRig, key: bytes, *parts: PromptPart) -> Heard:
        heard = Heard()
        rig.engine.submit(GenerateRequest("next", parts, options, heard.events.append, prefix_key=key))
        rig.run()
        return heard

    warm = ask(rig, b"kept", PromptPart(turn.ids, Serving.PREFIX), question)
    assert [part.reused_tokens for part in warm.served] == [len(turn.ids), 0]
    other = make_engine()
    other.capture(CaptureSegment(b"one", IDS))
    behind = PromptPart((*turn.parts[2].token_ids, *turn.reply, turn.stop, NEWLINE))
    fresh = ask(other, b"", turn.parts[0], segment(b"one", IDS), behind, question)
    assert warm.tokens == fresh.tokens
    assert_close(_logprobs(warm), _logprobs(fresh), TOLERANCE, "log probabilities of the next turn")
    early = PromptPart(behind.token_ids[:-1])
    off = ask(other, b"", turn.parts[0], segment(b"one", IDS), early, question)
    assert_far(_logprobs(off)[0], _logprobs(warm)[0], TOLERANCE)


def _logprobs(heard: Heard) -> torch.Tensor:
    found = [event.logprobs for event in heard.events if hasattr(event, "logprobs")]
    return torch.tensor([[value for _, value in each.top] for each in found if each is not None])


@pytest.mark.parametrize("why", ["another stop token", "no room behind it", "max_tokens", "cancelled"])
def test_nothing_is_held(why: str, rig: EngineRig) -> None:
    turn = Turn(rig, (live(21, 3), live(6, 4)))
    length = len(turn.reply)
    max_tokens = {"max_tokens": length, "no room behind it": length + 1}.get(why, 12)
    heard = turn.submit(max_tokens, first=turn.stop + 1 if why == "another stop token" else None)
    if why == "cancelled":
        while not any(isinstance(event, FinishedEvent) for event in heard.events):
            rig.step()
        rig.engine.cancel("turn")
    rig.run()
    if why != "cancelled":
        assert isinstance(heard.events[-1], FinishedEvent)
        assert not heard.events[-1].holds
        assert heard.events[-1].reason is (FinishReason.LENGTH if why == "max_tokens" else FinishReason.STOP)
    assert heard.tokens == turn.reply
    rig.assert_nothing_held()


def test_a_held_state_makes_room_for_prompts(make_engine: EngineFactory) -> None:
    rig = make_engine(num_pages=8, prime_tokens=0)
    turn = Turn(rig, (live(21, 3),))
    heard = turn.submit()
    rig.run()
    assert _held(heard) is not None
    assert b"held" in rig.context.store
    other = rig.submit("other", live(100, 5), max_tokens=20)
    rig.run()
    assert other.is_complete
    assert b"held" not in rig.context.store
    assert Rename(b"held", b"kept")(rig.engine) == 0
    rig.assert_nothing_held()


def test_others_decode_beside_a_message_that_ends(rig: EngineRig, make_engine: EngineFactory) -> None:
    turn = Turn(rig, (live(21, 3), live(6, 4)))
    alone = rig.submit("alone", live(15, 6), max_tokens=20)
    rig.run()
    heard, beside = turn.submit(), rig.submit("beside", live(15, 6), max_tokens=20)
    rig.run()
    assert heard.tokens == turn.reply
    assert beside.tokens == alone.tokens
    assert _state(rig, b"held").token_ids == turn.ids
    rig.drop_all([b"held"])
    rig.assert_nothing_held()
