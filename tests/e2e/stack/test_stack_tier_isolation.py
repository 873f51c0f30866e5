"""Every tier keeps tenants apart and believes no byte: each claim beside its opposite, through HTTP.

A state is stored, and pushed out of the engine's memory by other documents, so that it lies in the tier alone. What an
explanation names as a document's tier is where its state came from.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from services.blob.layout import write_state
from services.blob.reader import BytesSource, StateReader
from tests.e2e.stack.asking import Answer, ask, document
from tests.e2e.stack.callers import Client, client_of, key_sections
from tests.e2e.stack.media import DiskMedium, HostMedium, Medium, PoolMedium, RedisMedium, can_alter_memory
from tests.e2e.stack.served import ServedStack, wait_until
from tests.redis_server import RedisServer
from tests.redis_server import redis_server as redis_server

KEYS = {
    "acme": ("acme", '"generate", "documents"'),
    "other": ("other", '"generate", "documents"'),
    "filler": ("filler", '"generate"'),
    "root": ("operations", '"admin"'),
}
# Sixteen pages, each larger than a document: a few requests push out whatever was there.
SMALL = {"HYPIC_WORKER_PAGE_TOKENS": "256", "HYPIC_WORKER_PAGE_BYTES": str(1 << 20)}
# Of so many fetches that would be slower than computing one is made all the same.
REFUSALS = 16


@dataclass(slots=True)
class Tiered:
    """A stack with one tier below the engine's memory, or none, and its callers."""

    stack: ServedStack
    medium: Medium
    clients: Mapping[str, Client]
    _names: Iterator[int] = field(default_factory=lambda: iter(range(10_000)))

    def __getitem__(self, name: str) -> Client:
        return self.clients[name]

    @property
    def is_pool(self) -> bool:
        return self.medium.tier == "worker"

    def fresh(self, **more: Any) -> dict[str, Any]:  # noqa: ANN401 # JSON
        """A document that nobody has seen."""
        return document(f"{self.medium.tier} {next(self._names)}") | more

    def store(self, name: str, asked: dict[str, Any], **more: Any) -> Answer:  # noqa: ANN401 # JSON
        """Ask for a document that is not stored; returns once its state lies in the tier."""
        answer = ask(self[name], [asked], **more)
        assert answer.served == ["cold"]
        self.settle()
        return answer

    def register(self, name: str, asked: dict[str, Any], **more: Any) -> None:  # noqa: ANN401 # JSON
        """Register a document; returns once its state lies in the tier."""
        assert self[name].call("POST", "/v1/documents", json=asked | more)["status"] == "stored"
        self.settle()

    def settle(self) -> None:
        """Until everything captured has been written to the tier."""
        written = f'tier="{self.medium.tier}"'
        if not self.is_pool:
            wait_until(
                lambda: self.stack.gauge("worker", "hypic_worker_demotions_total", written) == self.stack.captures()
            )

    def displace(self) -> None:
        """Leave what is stored in the tier alone."""
        for _ in range(0 if self.is_pool else 2):
            ask(self["filler"], [self.fresh() for _ in range(6)], max_tokens=1)
            self.settle()

    def fetched(self, name: str, asked: dict[str, Any], **more: Any) -> Answer:  # noqa: ANN401 # JSON
        """An answer for which the document's state was looked for in the tier, and not only thought too slow."""
        for _ in range(REFUSALS):
            answer = ask(self[name], [asked], **more)
            if answer.segments[0]["reason"] != "fetch_slower":
                break
        return answer

    def check_hit(self, name: str, asked: dict[str, Any], **more: Any) -> Answer:  # noqa: ANN401 # JSON
        """The document's state came from the tier."""
        answer = self.fetched(name, asked, **more)
        assert (answer.served, answer.segments[0]["tier"]) == (["hit"], self.medium.tier)
        return answer


@contextmanager
def _served(medium: Medium, checkpoint: Path, folder: Path) -> Iterator[Tiered]:
    keys = folder / "keys.toml"
    keys.write_text(key_sections(KEYS))
    variables = {"HYPIC_ROUTER_API_KEYS_FILE": str(keys), **SMALL, **medium.variables}
    with ServedStack(checkpoint, folder / "log", variables) as stack:
        if isinstance(medium, HostMedium):
            medium.worker_pid = lambda: stack.pid("worker")
        tiered = Tiered(stack, medium, {name: client_of(name, stack.model, stack.base_url) for name in KEYS})
        yield tiered
        for client in tiered.clients.values():
            client.http.close()


@pytest.fixture(scope="module")
def tiered(
    request: pytest.FixtureRequest,
    random_checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
    redis_server: RedisServer,
) -> Iterator[Tiered]:
    folder = tmp_path_factory.mktemp("tiered")
    media: Mapping[str, Medium] = {
        "worker": PoolMedium(),
        "host": HostMedium(lambda: 0),
        "disk": DiskMedium(folder / "states"),
        "redis": RedisMedium(redis_server.url, "isolation-test"),
    }
    with _served(media[request.param], random_checkpoint, folder) as served:
        yield served


with_blobs = pytest.mark.parametrize("tiered", ["host", "disk", "redis"], indirect=True, scope="module")
in_every_tier = pytest.mark.parametrize("tiered", ["worker", "host", "disk", "redis"], indirect=True, scope="module")


@in_every_tier
def test_a_tenant_and_a_salt_meet_only_themselves(tiered: Tiered) -> None:
    asked = tiered.fresh()
    expected = tiered.store("acme", asked, cache_salt="s").text
    others = [("acme", {"cache_salt": "t"}), ("acme", {}), ("other", {"cache_salt": "s"}), ("other", {})]
    tiered.displace()
    for name, more in others:
        assert tiered.store(name, asked, **more).text == expected
    tiered.displace()
    for name, more in [("acme", {"cache_salt": "s"}), *others]:
        assert tiered.check_hit(name, asked, **more).text == expected


@in_every_tier
def test_what_is_revoked_or_of_an_old_version_misses(tiered: Tiered) -> None:
    """Gone for its tenant, and from the medium; another tenant's copy of the same text stays."""
    revoked, old, tagged = (tiered.fresh(id=name) for name in ("revoked", "versioned", "tagged"))
    for name in ("acme", "other"):
        for asked in (revoked, old, tagged):
            tiered.register(name, asked, tags=["t"] if asked is tagged else [])
    tiered.displace()
    before = set(tiered.medium.blobs())
    acme = tiered["acme"]
    acme.call("DELETE", "/v1/documents/revoked")
    acme.call("POST", "/v1/invalidate", json={"tag": "t"})
    acme.call("POST", "/v1/documents", json=old | {"text": old["text"] + " new"})
    tiered.settle()
    if tiered.medium.tier in ("disk", "redis"):
        wait_until(lambda: len(before - set(tiered.medium.blobs())) == 3)
    for asked, served in ((revoked, "cold"), (tagged, "cold"), (old, "live")):
        assert ask(acme, [asked]).served == [served]
        tiered.check_hit("other", asked)
    assert ask(acme, [old]).segments[0]["reason"] == "superseded"
    assert ask(acme, [old]).text == ask(acme, [old], reuse="off").text


@in_every_tier
def test_what_is_of_an_old_epoch_misses(tiered: Tiered) -> None:
    asked = tiered.fresh()
    for name in ("acme", "other"):
        tiered.store(name, asked)
    tiered.displace()
    tiered["acme"].call("POST", "/v1/invalidate", json={"tenant": "acme"})
    tiered.store("acme", asked)
    tiered.check_hit("other", asked)
    tiered.displace()
    revision = tiered["acme"].call("GET", "/v1/models")["data"][0]["revision"]
    assert tiered["root"].call("POST", "/v1/invalidate", json={"model": "another"})["entries"] == 0
    tiered.check_hit("acme", asked)
    tiered.displace()
    assert tiered["root"].call("POST", "/v1/invalidate", json={"model": revision})["entries"] > 0
    for name in ("acme", "other"):
        tiered.store(name, asked)


def flipped(blob: bytes) -> bytes:
    middle = len(blob) // 2
    return blob[:middle] + bytes([blob[middle] ^ 1]) + blob[middle + 1 :]


def truncated(blob: bytes) -> bytes:
    return blob[: len(blob) // 2]


def of_another_profile(blob: bytes) -> bytes:
    """Whole, with right checksums, and as long."""
    reader = StateReader(BytesSource(blob))
    other = "0" * len(reader.header.profile_digest)
    planes = [plane for layer in reader.layers() for plane in layer]
    return b"".join(write_state(replace(reader.header, profile_digest=other), planes))


POISONS: tuple[tuple[Callable[[bytes], bytes], str], ...] = (
    (flipped, "blob_damaged"),
    (truncated, "blob_damaged"),
    (of_another_profile, "blob_foreign"),
)


@with_blobs
def test_a_poisoned_state_is_seen_and_computed_anew(tiered: Tiered) -> None:
    if tiered.medium.tier == "host" and not can_alter_memory(tiered.stack.pid("worker")):
        pytest.skip("this machine lets no test write into another process's memory")
    stored = [_Stored.of(tiered) for _ in POISONS]
    tiered.displace()
    for one in stored:
        # What is put back as it was is as good: only what the bytes say counts.
        tiered.medium.alter(one.name, one.blob)
        assert tiered.check_hit("acme", one.asked).text == one.composed
    tiered.displace()
    for one, (poison, reason) in zip(stored, POISONS, strict=True):
        corrupt = tiered.stack.gauge("worker", "hypic_worker_corrupt_blobs_total")
        tiered.medium.alter(one.name, poison(one.blob))
        answer = tiered.fetched("acme", one.asked)
        assert (answer.served, answer.segments[0]["reason"]) == (["live"], reason)
        assert answer.text == one.recomputed
        seen = tiered.stack.gauge("worker", "hypic_worker_corrupt_blobs_total") - corrupt
        assert seen == (1 if reason == "blob_damaged" else 0)
    for one in stored:
        wait_until(lambda asked=one.asked: ask(tiered["acme"], [asked]).served == ["hit"])  # type: ignore[misc] # bound now
    tiered.settle()
    tiered.displace()
    for one in stored:
        assert tiered.check_hit("acme", one.asked).text == one.composed


@dataclass(frozen=True, slots=True)
class _Stored:
    """A document, its blob, and what is answered with its state and without."""

    asked: dict[str, Any]
    name: str
    blob: bytes
    composed: str
    recomputed: str

    @classmethod
    def of(cls, tiered: Tiered) -> "_Stored":
        """Store one that nobody has seen."""
        asked, before = tiered.fresh(), tiered.medium.blobs()
        composed = tiered.store("acme", asked).text
        recomputed = ask(tiered["acme"], [asked], reuse="off").text
        assert composed != recomputed
        ((name, blob),) = tiered.medium.blobs().items() - before.items()
        return cls(asked, name, blob, composed, recomputed)
