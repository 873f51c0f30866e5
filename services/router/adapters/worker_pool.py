"""The workers that the router knows, and the one model that all of them serve; implements `Models`, `Workers` and
`WorkerStatuses`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields

import grpc

from services.common.errors import UnavailableError
from services.common.rpc import create_channel
from services.router.adapters.clients import Description, GrpcWorker
from services.router.adapters.worker_link import LinkState, WorkerLink
from services.router.domain.calibration import Calibration, agreed
from services.router.domain.ports import Source, Work
from services.router.domain.store import WorkerStatus
from services.router.domain.unmeasured import assume_speeds
from services.router.domain.workers import Role, WorkerView
from services.router.served_model import ServedModel

__all__ = ["WorkerPool"]

# A broken stream is seen before the channel's change of state; the links get a turn to notice it.
_NOTICE_SECONDS = 0.25


class WorkerPool:
    """Links to all addresses that discovery names. Workers of another model or profile than the first one's are refused
    until the last of those is gone.
    """

    def __init__(
        self,
        build: Callable[[Description], ServedModel],
        silence_seconds: float,
        connect: Callable[[str], grpc.aio.Channel] = create_channel,
    ) -> None:
        self._connect = connect
        self._build = build
        self._silence_seconds = silence_seconds
        self._links: dict[str, WorkerLink] = {}
        self._model: ServedModel | None = None
        self._description: Description | None = None
        self._accepting = asyncio.Lock()
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()

    def update(self, addresses: Collection[str]) -> None:
        """Follow these addresses. One that is named no more is given up as soon as its worker does not answer."""
        for address in sorted(set(addresses) - set(self._links)):
            self._links[address] = WorkerLink(
                address, self._connect(address), self._accept, self._note, self._silence_seconds
            )
        gone = [link for address, link in self._links.items() if address not in addresses]
        for link in gone:
            if link.state not in (LinkState.READY, LinkState.DRAINING):
                del self._links[link.address]
                self._close_behind(link)
        self._wake()

    async def close(self) -> None:
        """Give up every connection."""
        for link in self._links.values():
            self._close_behind(link)
        self._links.clear()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def states(self) -> Mapping[tuple[str, str], int]:
        """How many workers there are, by role and state; those that were never described have the role `unknown`."""
        counts: Counter[tuple[str, str]] = Counter()
        for link in self._links.values():
            roles = ["unknown"] if link.description is None else sorted(link.description.roles)
            counts.update((role, link.state.value) for role in roles)
        return counts

    def statuses(self) -> tuple[WorkerStatus, ...]:
        """See `WorkerStatuses`."""
        return tuple(link.status() for _, link in sorted(self._links.items()))

    def require(self) -> ServedModel:
        """See `Models`."""
        if self._model is None or not any(link.can_combine for link in self._links.values()):
            raise UnavailableError(self._trouble())
        return self._model

    async def wait_back(self, seconds: float) -> ServedModel:
        """See `Models`."""
        try:
            async with asyncio.timeout(seconds):
                await asyncio.sleep(_NOTICE_SECONDS)
                while True:
                    self._changed.clear()
                    try:
                        return self.require()
                    except UnavailableError:
                        await self._changed.wait()
        except TimeoutError:
            raise UnavailableError(self._trouble()) from None

    def calibration(self) -> Calibration:
        """See `Models`."""
        return agreed(link.description.calibration for link in self._taken() if link.description is not None)

    def views(self) -> tuple[WorkerView, ...]:
        """See `Workers`. Silent workers are among them only where no other one combines."""
        answering = [link.view() for link in self._taken() if link.state is not LinkState.SILENT]
        if not any(view.accepts(Role.COMBINE) for view in answering):
            answering += [link.view() for link in self._taken() if link.state is LinkState.SILENT]
        return assume_speeds(sorted(answering, key=lambda view: view.worker_id))

    def find(self, worker_id: str) -> GrpcWorker:
        """See `Workers`."""
        link = self._find(worker_id)
        if link is None:
            raise UnavailableError(f"worker {worker_id} cannot be reached now")
        return link.worker

    def sources(self, worker_ids: Sequence[str]) -> tuple[Source, ...]:
        """See `Workers`."""
        found = ((worker_id, self._find(worker_id)) for worker_id in worker_ids)
        return tuple(Source(worker_id, link.address) for worker_id, link in found if link is not None)

    @contextmanager
    def occupy(self, worker_id: str, work: Work) -> Iterator[None]:
        """See `Workers`."""
        link = self._find(worker_id)
        with nullcontext() if link is None else link.load.occupy(work):
            yield

    def _taken(self) -> Iterable[WorkerLink]:
        return (link for link in self._links.values() if link.is_taken)

    def _find(self, worker_id: str) -> WorkerLink | None:
        return next((link for link in self._taken() if link.worker_id == worker_id), None)

    async def _accept(self, link: WorkerLink, description: Description) -> str:
        async with self._accepting:
            others = [other for other in self._taken() if other is not link]
            for other in others:
                if other.worker_id == description.worker_id:
                    return (
                        f"worker id {description.worker_id!r} of {link.address} is that of {other.address} already; give"
                        " every worker an id of its own (HYPIC_WORKER_WORKER_ID)"
                    )
            known = self._description
            difference = "" if known is None else _difference(known, description)
            if others and difference:
                return f"the worker at {link.address} is not like the others: {difference}"
            if known is None or difference:
                self._model = await asyncio.to_thread(self._build, description)
                self._description = description
            link.admit(description)
            return ""

    def _note(self, link: WorkerLink) -> None:
        self._wake()
        if link.state is LinkState.SILENT and self._has_other_combiner(link):
            link.worker.abort(link.trouble)

    def _has_other_combiner(self, link: WorkerLink) -> bool:
        return any(view.accepts(Role.COMBINE) and view.worker_id != link.worker_id for view in self.views())

    def _wake(self) -> None:
        self._changed.set()

    def _trouble(self) -> str:
        """Why no worker takes a prompt."""
        troubles = [link.trouble for _, link in sorted(self._links.items()) if link.trouble]
        if troubles:
            return "; ".join(troubles)
        return "no worker that combines is known; see HYPIC_ROUTER_WORKERS and HYPIC_WORKER_ROLES"

    def _close_behind(self, link: WorkerLink) -> None:
        task = asyncio.create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _difference(known: Description, other: Description) -> str:
    """In what a worker's model differs; empty where it does not."""
    own, theirs = known.info, other.info
    for name, ours, its in (
        ("model", own.name, theirs.name),
        ("model revision", own.revision, theirs.revision),
        ("profile digest", own.profile.digest, theirs.profile.digest),
        ("context length", own.context_length, theirs.context_length),
    ):
        if ours != its:
            return f"its {name} is {its}, theirs {ours}"
    unlike = [field.name for field in fields(own) if getattr(own, field.name) != getattr(theirs, field.name)]
    if known.tokenizer_json != other.tokenizer_json:
        unlike.append("tokenizer.json")
    return f"its {', '.join(unlike)} differ" if unlike else ""
