"""Follows one worker: describes it when it comes, asks it how it is, notices when it goes, drains or falls silent."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from enum import StrEnum

import grpc

from services.common.errors import HypicError
from services.common.telemetry import get_logger
from services.router.adapters.clients import Description, GrpcWorker, Report
from services.router.adapters.worker_load import WorkerLoad
from services.router.domain.model import ModelRefusedError
from services.router.domain.store import WorkerStatus
from services.router.domain.unmeasured import UNMEASURED
from services.router.domain.workers import Role, TransferSpeed, WorkerSpeeds, WorkerView

__all__ = ["LinkState", "WorkerLink"]

_DESCRIBE_TIMEOUT_SECONDS = 30.0
_RETRY_SECONDS = 0.25
# Building and checking a model again is work; it only helps once the worker serves another one.
_REFUSED_RETRY_SECONDS = 5.0
_REPORT_SECONDS = 1.0


# To workers whose states go to nobody, and who take nobody's.
_NO_WAY = TransferSpeed(1e9, 1.0)


class LinkState(StrEnum):
    """`silent`: its connection stands, and it answers nothing; `refused`: it serves something else than the others."""

    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    SILENT = "silent"
    REFUSED = "refused"


def _with_ways(speeds: WorkerSpeeds, description: Description) -> WorkerSpeeds:
    if not description.moves_states:
        return replace(speeds, same_host=_NO_WAY, other_host=_NO_WAY)
    pieces = description.info.num_layers
    same_host, other_host = (replace(way, num_pieces=pieces) for way in (speeds.same_host, speeds.other_host))
    return replace(speeds, same_host=same_host, other_host=other_host)


class WorkerLink:
    """One address. `accept` admits a described worker, or says why not; `note` hears of every change.

    silence_seconds: a worker that answers nothing for so long counts as silent.
    """

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        accept: Callable[["WorkerLink", Description], Awaitable[str]],
        note: Callable[["WorkerLink"], None],
        silence_seconds: float,
    ) -> None:
        self.address = address
        self.state = LinkState.CONNECTING
        self.trouble = f"the worker at {address} has not been reached yet"
        self.description: Description | None = None
        self.load = WorkerLoad()
        self._speeds = UNMEASURED
        # As views have them: made anew with a report, not for each of the many requests between two.
        self._speeds_with_ways = UNMEASURED
        self._channel = channel
        self.worker = GrpcWorker(self._channel)
        self._accept = accept
        self._note = note
        self._silence_seconds = silence_seconds
        self._answered_at = 0.0
        self._report: Report | None = None
        self._task = asyncio.create_task(self._run())

    @property
    def worker_id(self) -> str:
        """Of the worker that was described last; empty before."""
        return "" if self.description is None else self.description.worker_id

    @property
    def is_taken(self) -> bool:
        """Its worker serves the model and is there, whether or not it takes new work."""
        return self.state in (LinkState.READY, LinkState.DRAINING, LinkState.SILENT)

    @property
    def can_combine(self) -> bool:
        """Its worker takes prompts, or would if it answered."""
        is_open = self.state in (LinkState.READY, LinkState.SILENT)
        return is_open and self.description is not None and Role.COMBINE in self.description.roles

    def admit(self, description: Description) -> None:
        """Take the described worker."""
        self.description = description
        self._speeds_with_ways = _with_ways(self._speeds, description)
        self._report = None
        self._answered_at = time.monotonic()
        self._become(LinkState.READY, "")
        get_logger().info("worker_described", address=self.address, worker_id=self.worker_id)

    def view(self) -> WorkerView:
        """As scheduling sees it; raises ValueError before it has been described."""
        if self.description is None:
            raise ValueError(f"the worker at {self.address} has not been described")
        return WorkerView(
            worker_id=self.description.worker_id,
            speeds=self._speeds_with_ways,
            roles=self.description.roles,
            host=self.address.rpartition(":")[0],
            backlog_seconds=self.load.backlog_seconds(self._speeds),
            running_requests=self.load.running_requests,
            is_draining=self.state is LinkState.DRAINING,
        )

    def status(self) -> WorkerStatus:
        """As an administrator sees it."""
        report = self._report
        return WorkerStatus(
            worker_id=self.worker_id,
            address=self.address,
            roles=() if self.description is None else tuple(sorted(self.description.roles)),
            state=self.state.value,
            trouble=self.trouble,
            num_running=report.num_running if report else 0,
            num_waiting=report.num_waiting if report else 0,
            tiers=report.tiers if report else (),
        )

    async def close(self) -> None:
        """Give up the connection, and every stream on it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    async def _run(self) -> None:
        while True:
            try:
                description = await self.worker.describe(_DESCRIBE_TIMEOUT_SECONDS)
                refusal = await self._accept(self, description)
            except HypicError as error:
                await self._wait_out(LinkState.CONNECTING, str(error), _RETRY_SECONDS)
            except ModelRefusedError as error:
                await self._wait_out(LinkState.REFUSED, str(error), _REFUSED_RETRY_SECONDS)
            except Exception as error:
                # Without this task the worker would never be found again.
                get_logger().exception("worker_link_failed", address=self.address)
                trouble = f"the worker's description cannot be used: {error!r}"
                await self._wait_out(LinkState.REFUSED, trouble, _REFUSED_RETRY_SECONDS)
            else:
                if refusal:
                    await self._wait_out(LinkState.REFUSED, refusal, _REFUSED_RETRY_SECONDS)
                else:
                    await self._follow()

    async def _follow(self) -> None:
        """Until the connection breaks."""
        broken = asyncio.create_task(self._until_disconnected())
        try:
            while not broken.done():
                await self._ask()
                await asyncio.wait([broken], timeout=_REPORT_SECONDS)
        finally:
            broken.cancel()
        self._become(LinkState.CONNECTING, f"the connection to the worker at {self.address} was lost")

    async def _ask(self) -> None:
        try:
            report = await self.worker.report(_REPORT_SECONDS)
        except HypicError as error:
            # A connection that breaks is seen by its state; one to a proxy stands while nobody is behind it.
            if time.monotonic() - self._answered_at > self._silence_seconds:
                trouble = f"the worker at {self.address} has not answered for {self._silence_seconds:g} s: {error}"
                self._become(LinkState.SILENT, trouble)
            return
        self._answered_at = time.monotonic()
        self._speeds = report.speeds
        if self.description is not None:
            self._speeds_with_ways = _with_ways(report.speeds, self.description)
        self._report = report
        self.load.take_report(report)
        if report.is_draining:
            self._become(LinkState.DRAINING, f"the worker at {self.address} is draining")
        else:
            self._become(LinkState.READY, "")

    async def _until_disconnected(self) -> None:
        while self._channel.get_state() is grpc.ChannelConnectivity.READY:
            await self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY)

    async def _wait_out(self, state: LinkState, trouble: str, pause_seconds: float) -> None:
        self._become(state, trouble)
        await asyncio.sleep(pause_seconds)

    def _become(self, state: LinkState, trouble: str) -> None:
        if (state, trouble) != (self.state, self.trouble):
            if trouble:
                get_logger().warning("worker_not_ready", address=self.address, state=state.value, reason=trouble)
            self.state, self.trouble = state, trouble
            self._note(self)
