"""A follower does what its leader tells it: the same commands between the same steps, and the tokens that were drawn.

Leader and follower are engines over whole models here, so that neither needs the other's part to go on.
"""

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
import torch

from services.common.errors import UnavailableError
from services.worker.adapters.engine_thread import EngineThread
from services.worker.engine.command_wire import decode, encode
from services.worker.engine.commands import Cancel, Command, Drop, Rename, Submit, SubmitCapture
from services.worker.engine.grammar import TokenGrammar
from services.worker.engine.leading import Lead, Orders, RankError, follow
from services.worker.engine.limits import EngineLimits
from services.worker.engine.loop import Engine
from services.worker.engine.refresh import RefreshOrder, SweepCost
from services.worker.engine.requests import (
    CaptureJob,
    CaptureSegment,
    GenerateRequest,
    PromptPart,
    Serving,
    SnapshotOrder,
    TurnHold,
)
from services.worker.engine.sampling import CreateSampler, Likeliest, Sampler, SamplingOptions
from tests.exactness.rig import create_context, draw_ids
from tests.models import VARIANTS, CheckpointFactory
from tests.unit.worker.engine_rig import Heard, create_profile

SEGMENT, QUESTION = draw_ids(40, seed=21), draw_ids(6, seed=22)
KEY, SNAPSHOT = bytes(range(32)), bytes(32)


def request(heard: Heard, temperature: float = 0.0, seed: int | None = None) -> GenerateRequest:
    parts = (PromptPart(SEGMENT, Serving.SEGMENT, KEY), PromptPart(QUESTION))
    options = SamplingOptions(
        6, temperature, top_p=0.9, top_k=50, seed=seed, stop_ids=frozenset({500, 400}), logprobs=2, min_p=0.01,
        logit_bias=((3, 1.5), (9, -2.0)), repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.5,
    )  # fmt: skip
    snapshots = (SnapshotOrder(SNAPSHOT, 1),)
    hold = TurnHold(b"held", (501, 3))
    return GenerateRequest(
        "asked", parts, options, heard.events.append, b"prefix", snapshots, priority=-3, turn=hold, tenant=b"\xff\x00"
    )


def ordered() -> Submit:
    """A request that captures its segment."""
    asked = request(Heard(), temperature=0.7, seed=9)
    segment, question = asked.parts
    return Submit(replace(asked, parts=(replace(segment, captures=True), question)))


def capture() -> SubmitCapture:
    return SubmitCapture(CaptureJob("captured", (CaptureSegment(KEY, SEGMENT),), lambda event: None, background=True))


@pytest.mark.parametrize(
    "command",
    [
        Submit(request(Heard())),
        Submit(replace(request(Heard()), refresh=RefreshOrder(3))),
        Submit(replace(request(Heard()), refresh=RefreshOrder(None, 0.5, SweepCost(0.1, 0.001)))),
        ordered(),
        capture(),
        Cancel("asked"),
        Drop((KEY, SNAPSHOT)),
        Drop(()),
        Rename(KEY, SNAPSHOT),
    ],
    ids=lambda command: type(command).__name__,
)
def test_a_command_arrives_as_it_was(command: Command) -> None:
    arrived = decode(encode(command))
    match command, arrived:
        case Submit(sent), Submit(came):
            assert replace(came, sink=sent.sink) == sent
        case SubmitCapture(sent_job), SubmitCapture(came_job):
            assert replace(came_job, sink=sent_job.sink) == sent_job
        case _:
            assert arrived == command


EngineMaker = Callable[[CreateSampler], Engine]


@pytest.fixture
def make(checkpoints: CheckpointFactory, device: torch.device) -> EngineMaker:
    """Engines that are alike."""

    def make(create_sampler: CreateSampler) -> Engine:
        context = create_context(checkpoints.directory(VARIANTS[0]), device, create_profile(5, None))
        return Engine(context, EngineLimits(context_length=2048), create_sampler)

    return make


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The leader's and the follower's."""
    own, theirs = socket.socketpair()
    with own, theirs:
        yield own, theirs


class Leader:
    """An engine whose commands and steps are told."""

    def __init__(self, make: EngineMaker, end: socket.socket) -> None:
        self.lead = Lead([end])
        self.engine = make(self.lead.create_sampler)

    def obey(self, command: Command) -> None:
        self.lead.tell(command)
        command(self.engine)

    def run(self) -> None:
        """To the end of what it was asked."""
        while not self.engine.is_idle:
            self.lead.step(self.engine)
            self.engine.step()


def catch_up(engine: Engine, orders: Orders) -> None:
    """Behind a leader that has closed its end."""
    with pytest.raises(RankError, match="leader of the group is gone"):
        follow(engine, orders)


def test_a_follower_ends_where_its_leader_is(make: EngineMaker, ends: tuple[socket.socket, socket.socket]) -> None:
    """Tokens are drawn without a seed: a follower that drew for itself would draw others."""
    leader, orders, drawn, heard = Leader(make, ends[0]), Orders(ends[1]), list[int](), Heard()

    class Noting(Sampler):
        def __init__(
            self, options: SamplingOptions, prompt_ids: Iterable[int] = (), grammar: TokenGrammar | None = None
        ) -> None:
            super().__init__(options, prompt_ids, grammar)
            self._told = orders.create_sampler(options)

        def draw(self, logits: torch.Tensor, likeliest: Likeliest) -> int:
            drawn.append(self._told.draw(logits, likeliest))
            return drawn[-1]

    follower = make(Noting)
    leader.obey(capture())
    leader.run()
    leader.obey(Submit(request(heard, temperature=5.0)))
    leader.run()
    leader.lead.close()
    catch_up(follower, orders)
    assert heard.is_complete
    assert drawn == heard.tokens
    for key in (KEY, SNAPSHOT):
        states = [engine.context.store.get(key) for engine in (leader.engine, follower)]
        assert states[0] is not None
        assert states[1] is not None
        assert states[0].token_ids == states[1].token_ids
    follower.check_integrity()


def test_a_turn_is_held_and_kept_by_both(make: EngineMaker, ends: tuple[socket.socket, socket.socket]) -> None:
    """Its end is run without drawing: each rank knows the tokens."""
    leader, orders, heard = Leader(make, ends[0]), Orders(ends[1]), Heard()
    follower = make(orders.create_sampler)
    options = SamplingOptions(12, stop_ids=frozenset({5}), min_tokens=3, logit_bias=((5, 100.0),))
    hold = TurnHold(KEY, (5, 9))
    leader.obey(Submit(GenerateRequest("turn", (PromptPart(QUESTION),), options, heard.events.append, turn=hold)))
    leader.run()
    leader.obey(Rename(KEY, SNAPSHOT))
    leader.lead.close()
    catch_up(follower, orders)
    for engine in (leader.engine, follower):
        state = engine.context.store.get(SNAPSHOT)
        assert state is not None
        assert state.token_ids == (*QUESTION, *heard.tokens, 5, 9)
        assert KEY not in engine.context.store
        engine.check_integrity()


def test_what_is_dropped_and_cancelled_is_so_for_both(
    make: EngineMaker, ends: tuple[socket.socket, socket.socket]
) -> None:
    leader, orders = Leader(make, ends[0]), Orders(ends[1])
    follower = make(orders.create_sampler)
    leader.obey(capture())
    leader.run()
    leader.obey(Drop((KEY,)))
    leader.obey(Submit(request(Heard())))
    leader.lead.step(leader.engine)
    leader.engine.step()
    leader.obey(Cancel("asked"))
    leader.lead.close()
    catch_up(follower, orders)
    assert KEY not in follower.context.store
    assert follower.is_idle
    assert follower.context.pages.num_free == leader.engine.context.pages.num_free


def test_a_follower_that_stands_elsewhere_gives_up(
    make: EngineMaker, ends: tuple[socket.socket, socket.socket]
) -> None:
    leader, orders = Leader(make, ends[0]), Orders(ends[1])
    follower = make(orders.create_sampler)
    leader.obey(capture())
    leader.run()
    follower.context.pages.allocate(1)
    with pytest.raises(RankError, match=r"stands at \(0, 0, 0, \d+\) where the leader says STEP"):
        follow(follower, orders)


def test_a_token_that_nobody_draws_is_seen(make: EngineMaker, ends: tuple[socket.socket, socket.socket]) -> None:
    lead, orders = Lead([ends[0]]), Orders(ends[1])
    lead.token(7)
    with pytest.raises(RankError, match="where the leader says TOKEN"):
        follow(make(orders.create_sampler), orders)


def test_a_fault_of_drawing_is_every_ranks(ends: tuple[socket.socket, socket.socket]) -> None:
    options, logits = SamplingOptions(max_tokens=1), torch.zeros(4)
    lead, orders = Lead([ends[0]]), Orders(ends[1])
    for sampler in (lead.create_sampler(options), orders.create_sampler(options)):
        with pytest.raises(ValueError, match="logits are not finite"):
            sampler.draw(logits, Likeliest(0, float("nan")))


def test_a_leader_notices_that_a_rank_is_gone(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].close()
    with pytest.raises(RankError, match="a rank of the group is gone"):
        Lead([ends[0]]).token(1)


async def test_a_caller_hears_of_a_rank_that_is_gone(
    make: EngineMaker, ends: tuple[socket.socket, socket.socket]
) -> None:
    lead, deaths = Lead([ends[0]]), list[BaseException]()
    thread = EngineThread(lambda: make(lead.create_sampler), deaths.append, lead)
    await thread.start()
    ends[1].close()
    for _ in range(2):
        with pytest.raises(UnavailableError, match="engine has ended"):
            await thread.call(Drop((KEY,)))
    thread.stop()
    assert [type(death) for death in deaths] == [RankError]


async def test_only_commands_are_told(make: EngineMaker, ends: tuple[socket.socket, socket.socket]) -> None:
    lead, orders = Lead([ends[0]]), Orders(ends[1])
    thread = EngineThread(lambda: make(lead.create_sampler), lambda error: None, lead)
    await thread.start()
    assert await thread.call(lambda engine: engine.num_running) == 0
    assert await thread.call(Drop((KEY,))) == 0
    thread.post(Cancel("nobody"))
    thread.stop()
    lead.close()
    told = []
    with contextlib.suppress(RankError):
        while True:
            told.append(decode(orders.receive()[1]))
    assert told == [Drop((KEY,)), Cancel("nobody")]
