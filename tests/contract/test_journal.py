"""The journal of the in-memory directory: what a restart must not undo, whatever becomes of process and file."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cache.adapters import journal as journal_module
from services.cache.adapters.journal import JournalFile
from services.cache.adapters.journal_lines import change_of, fields_of
from services.cache.adapters.memory_changes import apply, everything
from services.cache.adapters.memory_snapshot import read_snapshot
from services.cache.adapters.memory_state import Tables
from services.cache.domain.changes import Change, Floor, Invalidated, Linked, Pinned, Registered, Unpinned
from services.cache.domain.errors import DirectoryUnavailableError, JournalError
from services.cache.domain.orders import RegisterOrder
from services.cache.domain.values import DocumentRecord, PlanOutcome, RegisterOutcome
from tests.contract.directory_rig import LIMITS, SECRET, Rig, digest, journaled_rig

HIT, COLD, SUPERSEDED = PlanOutcome.HIT, PlanOutcome.COLD, PlanOutcome.SUPERSEDED


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "directory.journal"


def contents(path: Path) -> bytes:
    return path.read_bytes()


def alter(path: Path, change: Callable[[bytes], bytes] | None) -> bytes:
    """What the file holds from now on; without a change it is gone."""
    altered = change(path.read_bytes()) if change else b""
    path.unlink()
    if change:
        path.write_bytes(altered)
    return altered


async def restarted(rig: Rig, path: Path) -> Rig:
    """The service in a process that comes after; workers keep their receipts."""
    await rig.directory.check_integrity()
    await rig.directory.close()
    again = journaled_rig(path, clock=rig.clock)
    again.receipts = rig.receipts
    await again.directory.check_integrity()
    return again


async def test_documents_tags_and_pins_outlive_a_restart(path: Path) -> None:
    rig = journaled_rig(path)
    await rig.beat("w1")
    first = await rig.register("x", "v1", "hr", title="Title")
    await rig.register("gone", "v1")
    await rig.invalidate_document("acme", "gone")
    await rig.pins.pin_document("acme", "x")
    await rig.pins.pin_tenant("other")
    await rig.pins.unpin_tenant("other")
    again = await restarted(rig, path)
    described = await again.documents.describe("acme", "x")
    assert described is not None
    assert described.record == DocumentRecord("x", "Title", ("hr",), digest("v1"), 100, first.version)
    assert (await again.register("x", "v1", "hr", title="Title")).outcome is RegisterOutcome.UNCHANGED
    page = await again.documents.page("acme", "", 10)
    assert [each.record.document_id for each in page.documents if each.record] == ["x"]
    await again.beat("w1")
    assert (await again.plan("v0", document="x")).entries[0].outcome is SUPERSEDED
    # A pinned state leaves no room for another; one of the tenant whose pin ended does.
    reply = await again.plan("v1", document="x")
    await again.publish(reply.entries[0], size=900)
    await again.cache.release(reply.lease_id)
    for tenant, size in (("other", 100), ("other", 100)):
        await again.store(f"{tenant}{size}{again.clock.now}", tenant=tenant, size=size)
        again.clock.now += 1
    assert (await again.plan("v1", document="x")).entries[0].outcome is HIT
    await again.directory.close()


@pytest.mark.parametrize("scope", ["document", "tag", "tenant", "model", "replaced"])
async def test_what_was_revoked_stays_so_through_restarts(path: Path, scope: str) -> None:
    """Its worker was away all the while, and comes back with a genuine receipt; another tenant's copy is taken back."""
    rig = journaled_rig(path)
    await rig.beat("w1")
    await rig.register("doc-a", "a", "hr")
    (revoked,), (kept,) = await rig.store("a"), await rig.store("b", tenant="other")
    rig.clock.now += 16
    match scope:
        case "document":
            await rig.invalidate_document("acme", "doc-a")
        case "tag":
            await rig.invalidate_tag("acme", "hr")
        case "tenant":
            await rig.invalidate_tenant("acme")
        case "model":
            await rig.invalidate_model("model-1")
        case _:
            await rig.register("doc-a", "newer")
    for _ in range(2):
        rig = await restarted(rig, path)
        expected = {revoked, kept} if scope == "model" else {revoked}
        assert await rig.beat("w1", [revoked, kept]) == expected
        assert await rig.outcomes("a") == [SUPERSEDED if scope == "replaced" else COLD]
        assert await rig.outcomes("b", tenant="other") == [COLD if scope == "model" else HIT]
    await rig.directory.close()


async def test_what_was_being_computed_when_it_was_revoked_is_refused_after_a_restart(path: Path) -> None:
    rig = journaled_rig(path)
    await rig.beat("w1")
    underway = (await rig.plan("a")).entries[0]
    await rig.invalidate_document("acme", "doc-a")
    rig = await restarted(rig, path)
    await rig.beat("w1")
    assert (await rig.publish(underway)).receipt == b""
    assert await rig.outcomes("a") == [COLD]
    await rig.directory.close()


async def test_a_late_document_reaches_its_states_through_a_restart(path: Path) -> None:
    rig = journaled_rig(path)
    await rig.beat("w1")
    reply = await rig.plan("a", document="")
    await rig.publish(reply.entries[0])
    key = reply.entries[0].key
    assert (await rig.plan("a", document="late")).entries[0].outcome is HIT
    rig = await restarted(rig, path)
    assert await rig.beat("w1", [key]) == set()
    assert await rig.invalidate_document("acme", "late") == 1
    rig = await restarted(rig, path)
    assert await rig.beat("w1", [key]) == {key}
    await rig.directory.close()


async def test_without_the_file_nothing_comes_back(path: Path) -> None:
    rig = journaled_rig(path)
    await rig.beat("w1")
    keys = await rig.store("a", "b")
    await rig.directory.close()
    alter(path, None)
    again = journaled_rig(path, clock=rig.clock)
    again.receipts = rig.receipts
    assert await again.beat("w1", keys) == set(keys)
    await again.directory.close()


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def _without_a_line(data: bytes) -> bytes:
    first, _, *others = data.splitlines(keepends=True)
    return first + b"garbage\n" + b"".join(others)


@pytest.mark.parametrize("damage", [_flipped, _without_a_line, lambda data: b"", lambda data: b"\0" * len(data)])
async def test_a_damaged_file_is_set_aside_and_nothing_comes_back(path: Path, damage: Callable[[bytes], bytes]) -> None:
    rig = journaled_rig(path)
    await rig.beat("w1")
    await rig.register("x", "v1")
    (key,) = await rig.store("a")
    await rig.register("y", "v1")
    await rig.directory.close()
    damaged = alter(path, damage)
    again = journaled_rig(path, clock=rig.clock)
    again.receipts = rig.receipts
    assert contents(path.with_name("directory.journal.damaged")) == damaged
    assert await again.beat("w1", [key]) == {key}
    assert await again.documents.describe("acme", "x") is None
    await again.register("x", "v1")
    again = await restarted(again, path)
    assert await again.documents.describe("acme", "x") is not None
    await again.directory.close()


async def test_a_write_that_was_never_finished_is_cut_off(path: Path) -> None:
    """Nobody was told of it; everything before it holds."""
    rig = journaled_rig(path)
    await rig.beat("w1")
    (key,) = await rig.store("a")
    await rig.register("x", "v1")
    await rig.register("y", "v1")
    await rig.directory.close()
    alter(path, lambda data: data[:-7])
    again = journaled_rig(path, clock=rig.clock)
    again.receipts = rig.receipts
    assert await again.beat("w1", [key]) == set()
    assert await again.documents.describe("acme", "x") is not None
    assert await again.documents.describe("acme", "y") is None
    assert (await again.register("z", "v1")).outcome is RegisterOutcome.CREATED
    again = await restarted(again, path)
    assert await again.documents.describe("acme", "z") is not None
    await again.directory.close()


async def test_a_failed_write_is_told_and_made_good_by_the_next(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = journaled_rig(path)
    await rig.beat("w1")
    await rig.register("before", "v1")

    def fail(_: int) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        for _ in range(2):
            with pytest.raises(DirectoryUnavailableError, match="journal cannot be written: no space"):
                await rig.register("x", "v1")
        # Plans that change nothing of what is kept go on.
        assert await rig.outcomes("a") == [COLD]
    assert (await rig.register("x", "v1")).outcome is RegisterOutcome.UNCHANGED
    again = await restarted(rig, path)
    assert [await again.documents.describe("acme", name) is not None for name in ("before", "x")] == [True, True]
    await again.directory.close()


async def test_the_file_stays_as_small_as_what_it_amounts_to(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_LEAST_LINES", 20)
    rig = journaled_rig(path)
    for number in range(200):
        await rig.register("x", f"v{number}", "hr")
        await rig.pins.pin_document("acme", "x")
    await rig.invalidate_tenant("other")
    assert len(contents(path).splitlines()) <= 22
    rig = await restarted(rig, path)
    assert len(contents(path).splitlines()) == 4
    described = await rig.documents.describe("acme", "x")
    assert described is not None
    assert described.record is not None
    assert described.record.digest == digest("v199")
    await rig.directory.close()


async def test_calls_at_once_are_all_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that come while the file is written anew."""
    monkeypatch.setattr(journal_module, "_LEAST_LINES", 8)
    rig = journaled_rig(path)
    await asyncio.gather(*(rig.register(f"doc {number}", "v1") for number in range(60)))
    rig = await restarted(rig, path)
    assert len((await rig.documents.page("acme", "", 100)).documents) == 60
    await rig.directory.close()


def test_a_killed_process_has_kept_what_it_answered(path: Path) -> None:
    script = """
        import asyncio, sys
        from pathlib import Path
        from tests.contract.directory_rig import journaled_rig
        async def main():
            rig = journaled_rig(Path(sys.argv[1]))
            for number in range(100_000):
                await rig.register(f"doc {number}", "v1")
                print(number, flush=True)
        asyncio.run(main())
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", textwrap.dedent(script), str(path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        answered = [int(process.stdout.readline()) for _ in range(50)]
        process.kill()
        answered += map(int, process.stdout.read().splitlines())
    assert process.returncode == -signal.SIGKILL
    rig = journaled_rig(path)

    async def known() -> bool:
        found = [await rig.documents.describe("acme", f"doc {number}") for number in answered]
        await rig.directory.close()
        return all(found)

    assert asyncio.run(known())


def test_nobody_else_may_read_it(path: Path) -> None:
    JournalFile(path, SECRET).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_file_that_cannot_be_used_says_why(path: Path, tmp_path: Path) -> None:
    first = JournalFile(path, SECRET)
    with pytest.raises(JournalError, match="used by a cache service that runs"):
        JournalFile(path, SECRET)
    first.close()
    with pytest.raises(JournalError, match="another HYPIC_CACHE_SECRET"):
        JournalFile(path, b"another secret")
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="may be written"):
        JournalFile(tmp_path / "file" / "journal", SECRET)
    JournalFile(path, SECRET).close()


SCOPES = st.sampled_from(["document:1", "document:2", "document:3"])
TAGS = st.sets(st.sampled_from(["tag:1", "tag:2"]))
KEYS = st.sampled_from([b"k" * 32, b"l" * 32])


def _registered(scope: str, tags: set[str], content: str, tenant: str) -> Registered:
    record = DocumentRecord(scope[-1], 'T "ü"\n', tuple(sorted(tag[-1] for tag in tags)), digest(content), 5)
    return Registered(RegisterOrder(tenant, scope, tuple(sorted(tags)), record))


CHANGES: st.SearchStrategy[Change] = st.one_of(
    st.builds(Invalidated, SCOPES | st.sampled_from(["tag:1", "tag:2", "tenant:1", "model:1"]), st.just(0)),
    st.builds(_registered, SCOPES, TAGS, st.sampled_from(["v1", "v2"]), st.sampled_from(["tenant:1", "tenant:2"])),
    st.builds(Linked, KEYS, SCOPES, st.just(0)),
    st.builds(Pinned, SCOPES | st.just("tenant:1")),
    st.builds(Unpinned, SCOPES | st.just("tenant:1")),
    st.builds(Floor, st.just(0)),
)


def _numbered(change: Change, sequence: int) -> Change:
    match change:
        case Invalidated():
            return replace(change, epoch=sequence)
        case Registered(order):
            return Registered(replace(order, record=replace(order.record, version=sequence)))
        case Linked() | Floor():
            return replace(change, sequence=sequence)
    return change


@given(st.lists(CHANGES, max_size=30), st.integers(2, 6))
def test_what_changes_amount_to_leads_to_the_same(changes: list[Change], capacity: int) -> None:
    """Also when much of the past has been forgotten, and through the file's lines."""
    limits = replace(LIMITS, max_remembered=capacity)
    first, second = Tables(limits), Tables(limits)
    for sequence, change in enumerate(changes, start=1):
        apply(first, _numbered(change, sequence))
    for change in everything(first):
        apply(second, change_of(fields_of(change)))
    for tables in (first, second):
        tables.raise_sequence(len(changes))
    assert read_snapshot(second) == read_snapshot(first)
    assert second.past.floor == first.past.floor
    assert second.documents.orders == first.documents.orders
