"""A cluster that things happen to, and the two right answers of its one document."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.e2e.stack.asking import Answer, ask, document
from tests.e2e.stack.cluster import Cluster
from tests.e2e.stack.served import wait_until
from tests.e2e.stack.worker_proxy import Fault

__all__ = [
    "COMBINE", "DEADLINE_SECONDS", "DOCUMENT", "PREFILL", "VARIABLES", "Asking", "Rig", "held", "reached", "release",
]  # fmt: skip

PREFILL, COMBINE = ("p0", "p1"), ("c0", "c1")
DEADLINE_SECONDS = 15.0
DOCUMENT = document("faults", 150)
VARIABLES = {
    "HYPIC_ROUTER_REQUEST_TIMEOUT_SECONDS": str(DEADLINE_SECONDS),
    "HYPIC_ROUTER_WORKER_SILENCE_SECONDS": "2",
    "HYPIC_ROUTER_WORKER_WAIT_SECONDS": "10",
    "HYPIC_ROUTER_HEDGE_SLACK_SECONDS": "0.5",
    "HYPIC_ROUTER_LEASE_SECONDS": "4",
    "HYPIC_CACHE_TICKET_SECONDS": "4",
    "HYPIC_WORKER_FETCH_SECONDS": "1",
    # As between hosts: bytes that can be spoilt on the way.
    "HYPIC_WORKER_SHARES_MEMORY": "false",
}


@dataclass(slots=True)
class Rig:
    """A cluster, and the two answers that the document has: composed, and computed whole."""

    cluster: Cluster
    composed: str = ""
    recomputed: str = ""
    num_salts: int = 0

    def learn(self) -> None:
        """The answers while nothing is wrong."""
        answer = self.ask("learn")
        assert answer.served == ["cold"]
        self.composed = answer.text
        self.recomputed = ask(self.cluster, [DOCUMENT], reuse="off").text
        # Else a wrong state could pass for a right one.
        assert self.composed != self.recomputed

    def new_salt(self) -> str:
        """Under another salt the document is new."""
        self.num_salts += 1
        return f"salt {self.num_salts}"

    def ask(self, salt: str, **more: Any) -> Answer:  # noqa: ANN401 # JSON
        return ask(self.cluster, [DOCUMENT], cache_salt=salt, **more)

    def check(self, answer: Answer) -> None:
        """The answer is the one of the way in which it says that it was served."""
        assert answer.text == (self.recomputed if answer.served == ["live"] else self.composed)

    def at(self, fault: Callable[[], Fault], names: tuple[str, ...] = PREFILL) -> dict[str, Fault]:
        """Put a fault of its own on every worker's way."""
        faults = {name: fault() for name in names}
        for name, own in faults.items():
            self.cluster.proxies[name].fault = own
        return faults

    def asking(self, salt: str) -> "Asking":
        return Asking(self, salt)

    def running(self, names: tuple[str, ...] = COMBINE) -> str:
        """The worker on which a request combines or decodes."""
        found: list[str] = []

        def has_one() -> bool:
            found[:] = [name for name in names if self.cluster.gauge(name, "hypic_worker_num_requests_running") > 0]
            return len(found) == 1

        wait_until(has_one)
        return found[0]


class Asking:
    """A request that is under way while something happens; its answer must come before the deadline."""

    def __init__(self, rig: Rig, salt: str) -> None:
        self._rig = rig
        self._salt = salt
        self._pool = ThreadPoolExecutor(1)
        self._answer: Any = None

    def __enter__(self) -> "Asking":
        self._began = time.monotonic()
        self._answer = self._pool.submit(self._rig.ask, self._salt)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)

    def answer(self) -> Answer:
        """The right one."""
        answer: Answer = self._answer.result(60)
        assert time.monotonic() - self._began < DEADLINE_SECONDS
        self._rig.check(answer)
        return answer


def reached(faults: dict[str, Fault]) -> str:
    """The worker whose messages have come to the fault."""
    found: list[str] = []

    def has_one() -> bool:
        found[:] = [name for name, fault in faults.items() if fault.reached.is_set()]
        return bool(found)

    wait_until(has_one)
    return found[0]


def release(faults: dict[str, Fault]) -> None:
    for fault in faults.values():
        fault.released.set()


def held() -> Fault:
    """A transfer stands still behind its first messages."""
    return Fault("Fetch", at_message=3, hold_seconds=8.0)
