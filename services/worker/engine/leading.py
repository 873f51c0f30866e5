"""How the ranks of a group stay alike: the leader tells the others, in order, what it obeys, when it steps, what it draws.

What an engine does in a step depends on its commands, its own state and drawn tokens alone, so that nothing else has to be
told. Messages run one way, over one socket a follower, whose end either side sees at once: no rank outlives its leader.
"""

import os
import select
import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import NoReturn

import torch

from services.worker.engine.command_wire import decode, encode
from services.worker.engine.commands import Command
from services.worker.engine.grammar import TokenGrammar
from services.worker.engine.loop import Engine
from services.worker.engine.sampling import Likeliest, Sampler, SamplingOptions
from services.worker.errors import WorkerError

__all__ = ["Lead", "Orders", "RankError", "follow"]

_HEAD = struct.Struct("<cI")
_NUMBER = struct.Struct("<i")
# Of an engine about to step: requests that wait, that combine or decode and that decode; free pages.
_STANDING = struct.Struct("<iiii")


class RankError(WorkerError):
    """The ranks are no longer alike, or one is gone: none of them can go on."""


class _Kind(StrEnum):
    COMMAND = "C"
    STEP = "S"
    TOKEN = "T"
    NO_TOKEN = "N"


class Lead:
    """The leader's end. Of the engine's thread alone."""

    def __init__(self, followers: Sequence[socket.socket]) -> None:
        self._followers = followers

    def tell(self, command: Command) -> None:
        """Have the followers obey too, between the same two steps."""
        self._send(_Kind.COMMAND, encode(command))

    def step(self, engine: Engine) -> None:
        """Have the followers step too."""
        self._send(_Kind.STEP, _standing(engine))

    def close(self) -> None:
        """End the followers, whatever they are doing."""
        for follower in self._followers:
            follower.close()

    def create_sampler(
        self, options: SamplingOptions, prompt_ids: Iterable[int] = (), grammar: TokenGrammar | None = None
    ) -> Sampler:
        """Draws, and says what was drawn."""
        return _TellingSampler(options, prompt_ids, grammar, self)

    def token(self, token: int) -> None:
        """A token was drawn."""
        self._send(_Kind.TOKEN, _NUMBER.pack(token))

    def no_token(self, fault: str) -> None:
        """None could be drawn."""
        self._send(_Kind.NO_TOKEN, fault.encode())

    def _send(self, kind: _Kind, body: bytes = b"") -> None:
        message = _HEAD.pack(kind.encode(), len(body)) + body
        try:
            for follower in self._followers:
                follower.sendall(message)
        except OSError as error:
            raise RankError(f"a rank of the group is gone ({error})") from error


class Orders:
    """A follower's end."""

    def __init__(self, leader: socket.socket) -> None:
        self._leader = leader

    def end_with_leader(self) -> None:
        """From now on the process ends with the leader, whatever it is doing.

        The engine's own thread may be waiting for a device on which the leader will never do its part.
        """
        threading.Thread(target=self._watch, name="leader-watch", daemon=True).start()

    def receive(self) -> tuple[_Kind, bytes]:
        """The next message.

        Raises:
            RankError: the leader is gone.
        """
        kind, size = _HEAD.unpack(self._read(_HEAD.size))
        return _Kind(kind.decode()), self._read(size)

    def create_sampler(
        self, options: SamplingOptions, prompt_ids: Iterable[int] = (), grammar: TokenGrammar | None = None
    ) -> Sampler:
        """Draws what the leader drew."""
        return _ToldSampler(options, self)

    def token(self) -> int:
        """What the leader drew.

        Raises:
            ValueError: it could draw none.
            RankError: the leader drew nothing here.
        """
        kind, body = self.receive()
        if kind is _Kind.NO_TOKEN:
            raise ValueError(body.decode())
        if kind is not _Kind.TOKEN:
            raise RankError(f"this rank draws a token where the leader says {kind.name}")
        (token,) = _NUMBER.unpack(body)
        return int(token)

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = self._leader.recv(size)
            if not part:
                raise RankError("the leader of the group is gone")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._leader, select.POLLHUP)
        poll.poll()
        os._exit(0)


class _TellingSampler(Sampler):
    def __init__(
        self, options: SamplingOptions, prompt_ids: Iterable[int], grammar: TokenGrammar | None, lead: Lead
    ) -> None:
        super().__init__(options, prompt_ids, grammar)
        self._lead = lead

    def draw(self, logits: torch.Tensor, likeliest: Likeliest) -> int:
        """See `Sampler`."""
        try:
            token = super().draw(logits, likeliest)
        except ValueError as error:
            self._lead.no_token(str(error))
            raise
        self._lead.token(token)
        return token


class _ToldSampler(Sampler):
    def __init__(self, options: SamplingOptions, orders: Orders) -> None:
        super().__init__(options)
        self._orders = orders

    def draw(self, logits: torch.Tensor, likeliest: Likeliest) -> int:
        """See `Sampler`."""
        return self._orders.token()


def follow(engine: Engine, orders: Orders) -> NoReturn:
    """Do what the leader does, until the process ends with it.

    Raises:
        RankError: this rank is not where the leader is, or the leader is gone.
    """
    while True:
        kind, body = orders.receive()
        if kind is _Kind.COMMAND:
            # What the engine refuses is for the leader to answer.
            with suppress(WorkerError):
                decode(body)(engine)
        elif kind is _Kind.STEP and body == _standing(engine):
            engine.step()
        else:
            own, leaders = _STANDING.unpack(_standing(engine)), body.hex()
            raise RankError(f"this rank stands at {own} where the leader says {kind.name} {leaders}")


def _standing(engine: Engine) -> bytes:
    return _STANDING.pack(engine.num_waiting, engine.num_running, engine.num_decoding, engine.context.pages.num_free)
