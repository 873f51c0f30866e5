"""The processes of a group's other ranks, which the leader starts, watches and ends."""

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from services.common.telemetry import get_logger
from services.worker.adapters.engine_builder import RankPlace
from services.worker.engine.leading import Lead
from services.worker.engine.ranks import rank_variables
from services.worker.mixers.share import Share

__all__ = ["Followers", "LostRank"]

_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class LostRank:
    """A process that ended before it was told to; a negative status is the signal that killed it."""

    rank: int
    status: int


@dataclass(frozen=True, slots=True)
class Followers:
    """Ranks 1 and up. lead: what tells them; place: the leader's own."""

    lead: Lead
    place: RankPlace
    _processes: Sequence[asyncio.subprocess.Process]
    _meeting: tempfile.TemporaryDirectory[str]

    @classmethod
    async def start(cls, count: int, revision: str) -> "Followers":
        """One process a rank, with this one's environment; `revision` is the checkpoint's, which takes long to read."""
        meeting = tempfile.TemporaryDirectory(prefix="hypic-ranks-")
        rendezvous = Path(meeting.name) / "meeting"
        for name, value in rank_variables().items():
            os.environ.setdefault(name, value)
        ends, processes = [], []
        for rank in range(1, count):
            own, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", "services.worker.follower", str(rank), str(theirs.fileno())]
                process = await asyncio.create_subprocess_exec(
                    *command, str(rendezvous), revision, pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL
                )
            ends.append(own)
            processes.append(process)
        lead = Lead(ends)
        return cls(lead, RankPlace(Share(0, count), rendezvous, lead.create_sampler), processes, meeting)

    async def lost(self) -> LostRank:
        """Waits until one of them ends."""
        waits = [asyncio.create_task(process.wait()) for process in self._processes]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        rank, status = next((rank, wait.result()) for rank, wait in enumerate(waits, 1) if wait in done)
        get_logger().error("rank_lost", rank=rank, status=status, ranks=len(waits) + 1)
        return LostRank(rank, status)

    async def stop(self) -> None:
        """They end by themselves once nobody leads; whoever does not is killed."""
        self.lead.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await asyncio.gather(*(process.wait() for process in self._processes))
        for process in self._processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
        self._meeting.cleanup()
