"""Load through a balancer while each service in turn is ended by SIGTERM and started again; every answer is checked."""

import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tests.e2e.stack.asking import CHAT, Answer, ask, body, read_stream
from tests.e2e.stack.cluster import Cluster
from tests.e2e.stack.served import wait_until

__all__ = ["DirectCluster", "RollingLoad", "restart_each"]

_NUM_CLIENTS = 4
_TOKENS = 16
_SERVICES = ("router", "second", "cache")


class DirectCluster(Cluster):
    """A cluster in which nobody stands between services."""

    def _own(self, name: str) -> dict[str, str]:
        own = super()._own(name)
        direct = {each: f"127.0.0.1:{self._ports[each]}" for each in self.roles}
        if name == "router":
            return own | {"HYPIC_ROUTER_WORKERS": ",".join(direct.values())}
        return own | {"HYPIC_WORKER_ADVERTISE_ADDRESS": direct[name]} if name in direct else own


@dataclass(slots=True)
class RollingLoad:
    """Clients that each wait for one answer before they ask again, over a connection of its own, without attempts of theirs.

    Every document has two right answers: composed, and computed whole.
    """

    cluster: Cluster
    url: str
    documents: Sequence[dict[str, str]]
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    _right: list[set[str]] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "RollingLoad":
        for each in self.documents:
            ask(self.cluster, [each], max_tokens=_TOKENS)
            texts = {ask(self.cluster, [each], max_tokens=_TOKENS, reuse=reuse).text for reuse in ("compose", "off")}
            self._right.append(texts)
        for seed in range(_NUM_CLIENTS):
            self._threads.append(threading.Thread(target=self._run, args=(seed,)))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a request hangs"

    @property
    def num_answers(self) -> int:
        """Requests that were answered, right or not."""
        return self.kinds.total()

    def wait_for(self, count: int) -> None:
        """Until so many more requests have been answered, or one has failed."""
        wanted = self.num_answers + count
        wait_until(lambda: self.num_answers >= wanted or bool(self.faults), 300)

    def _run(self, seed: int) -> None:
        source = random.Random(seed)
        limits = httpx2.Limits(max_keepalive_connections=0)
        headers = {"connection": "close"}
        with httpx2.Client(base_url=self.url, timeout=100, limits=limits, headers=headers) as http:
            while not self._stopping.is_set():
                index, is_stream = source.randrange(len(self.documents)), source.random() < 0.5
                request = body(self.cluster, [self.documents[index]], max_tokens=_TOKENS, stream=is_stream)
                try:
                    text = _stream(http, request) if is_stream else _whole(http, request)
                except (httpx2.TransportError, AssertionError, KeyError) as error:
                    self.faults.append(repr(error))
                    continue
                if text not in self._right[index]:
                    self.faults.append(f"document {index}: {text!r}")
                self.kinds["streams" if is_stream else "whole"] += 1


def _whole(http: httpx2.Client, request: dict[str, Any]) -> str:
    response = http.post(CHAT, json=request)
    assert response.status_code == 200, response.text
    return Answer(response.json()).text


def _stream(http: httpx2.Client, request: dict[str, Any]) -> str:
    with http.stream("POST", CHAT, json=request) as response:
        assert response.status_code == 200, response.read()
        reply = read_stream(response.iter_lines())
    assert reply.is_ended, reply
    assert reply.error is None, reply
    return reply.text


def restart_each(cluster: Cluster, load: RollingLoad, between: int) -> None:
    """One round: SIGTERM to each service, its start, and so many answers before the next one."""
    for name in (*_SERVICES, *cluster.roles):
        assert cluster.end(name) == 0
        cluster.spawn(name)
        cluster.wait_ready()
        load.wait_for(between)
        if load.faults:
            return
