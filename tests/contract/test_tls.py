"""Mutual TLS: who has no certificate of the authority is served nothing, and is told why."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx2
import pytest
from hypic.v1 import cache_pb2, cache_pb2_grpc

from services.cli.ports import free_port, grpc_ready
from services.common.errors import UnavailableError, error_from_status
from services.common.rpc import HealthSwitch, cache_channel, create_server, serve_health
from services.common.settings import SettingsError
from services.common.tls import Identity, TlsFiles
from services.router.settings import RouterSettings
from tests.certificates import Authority, CertificateFiles
from tests.e2e.stack.asking import CHAT
from tests.router_stack import RouterStack, RunningRouter, StubServices, wait_until
from tests.stub_cache import StubCache
from tests.stub_worker import MODEL_NAME

BODY = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Why?"}]}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def served(authority: Authority) -> CertificateFiles:
    """Of services: one certificate with both names."""
    return authority.issue("hypic-cache", "hypic-worker", file="served")


def files_of(held: CertificateFiles) -> TlsFiles:
    return TlsFiles(held.cert, held.key, held.ca)


def identity(held: CertificateFiles, believes: Authority | None = None, name: str = "hypic-cache") -> Identity:
    ca_file = believes.ca_file if believes else held.ca
    return Identity(TlsFiles(held.cert, held.key, ca_file), name, "hypic-worker")


@asynccontextmanager
async def cache_service(held: CertificateFiles) -> AsyncIterator[int]:
    cache = StubCache()
    server, port = await create_server(
        [lambda server: cache_pb2_grpc.add_CacheServiceServicer_to_server(cache, server)],
        "127.0.0.1:0",
        HealthSwitch(),
        files_of(held),
    )
    try:
        yield port
    finally:
        await server.stop(0)


async def call(channel: grpc.aio.Channel) -> None:
    """Raises `HypicError`."""
    async with channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        try:
            await stub.ListWorkers(cache_pb2.ListWorkersRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error) from error


async def test_a_peer_with_a_certificate_is_served(authority: Authority, served: CertificateFiles) -> None:
    async with cache_service(served) as port:
        await call(cache_channel(f"127.0.0.1:{port}", identity(authority.issue("a-router"))))


async def test_others_are_refused(authority: Authority, other: Authority, served: CertificateFiles) -> None:
    nobody = grpc.ssl_channel_credentials(authority.ca_file.read_bytes())
    named = [("grpc.ssl_target_name_override", "hypic-cache")]
    foreign, expired = other.issue("a-router"), authority.issue("a-router", file="expired", is_expired=True)
    async with cache_service(served) as port:
        address = f"127.0.0.1:{port}"
        for channel in (
            cache_channel(address, None),
            grpc.aio.secure_channel(address, nobody, options=named),
            cache_channel(address, identity(foreign, believes=authority)),
            cache_channel(address, identity(expired)),
        ):
            with pytest.raises(UnavailableError):
                await call(channel)


async def test_a_service_that_is_not_who_it_should_be_is_not_believed(
    authority: Authority, other: Authority, served: CertificateFiles
) -> None:
    """Of another authority, expired, or a worker in the cache service's place."""
    own = authority.issue("a-router")
    for impostor in (
        other.issue("hypic-cache"),
        authority.issue("hypic-cache", file="late", is_expired=True),
        authority.issue("hypic-worker"),
    ):
        async with cache_service(impostor) as port:
            with pytest.raises(UnavailableError, match=r"(?i)certificate|hostname|peer name|handshake"):
                await call(cache_channel(f"127.0.0.1:{port}", identity(own)))


async def test_a_server_follows_its_files(authority: Authority, tmp_path: Path) -> None:
    """The same files with another certificate: new connections see it, without a restart."""
    held = Authority(tmp_path / "own").issue("hypic-cache")
    own = authority.issue("a-router")
    async with cache_service(held) as port:
        with pytest.raises(UnavailableError):
            await call(cache_channel(f"127.0.0.1:{port}", identity(own)))
        renewed = authority.issue("hypic-cache", file="renewed")
        for old, new in ((held.cert, renewed.cert), (held.key, renewed.key), (held.ca, renewed.ca)):
            old.write_bytes(new.read_bytes())
        await call(cache_channel(f"127.0.0.1:{port}", identity(own)))


async def test_probes_need_no_certificate_where_they_have_a_port(served: CertificateFiles) -> None:
    health, address = HealthSwitch(), f"127.0.0.1:{free_port()}"
    server, port = await create_server([], "127.0.0.1:0", health, files_of(served))
    probed = await serve_health(address, health)
    assert probed is not None
    assert not await grpc_ready(address)
    await health.set_ready(True)
    assert await grpc_ready(address)
    assert not await grpc_ready(f"127.0.0.1:{port}")
    await asyncio.gather(server.stop(0), probed.stop(0))


@pytest.fixture(scope="module")
def secured(authority: Authority, served: CertificateFiles) -> Iterator[RouterStack]:
    settings = RouterSettings.from_environment(**authority.issue("a-router", file="router").settings())
    with RouterStack(settings, tls=files_of(served)) as stack:
        yield stack


def test_a_router_answers_through_tls(secured: RouterStack) -> None:
    assert secured.http.post(CHAT, json=BODY).status_code == 200


@pytest.mark.parametrize("is_foreign", [True, False])
def test_readiness_says_why(other: Authority, served: CertificateFiles, *, is_foreign: bool) -> None:
    """A router of another authority, and one that speaks plain text."""
    own = (
        RouterSettings.from_environment(**other.issue("a-router", file="router").settings())
        if is_foreign
        else RouterSettings()
    )
    with StubServices(tls=files_of(served)) as services:
        settings = own.model_copy(update={"port": 0, "workers": services.worker_addresses, "worker_wait_seconds": 0.2})
        with RunningRouter(services, settings) as url:

            def reason() -> str:
                return str(httpx2.get(f"{url}/health/ready").json().get("reason"))

            wait_until(lambda: services.worker_addresses in reason() and "not been reached" not in reason())
            assert ("CERTIFICATE_VERIFY_FAILED" in reason()) is is_foreign
            assert httpx2.post(f"{url}{CHAT}", json=BODY).status_code == 503


def test_https_with_client_certificates_and_probes_beside(
    authority: Authority, other: Authority, tmp_path: Path
) -> None:
    own, beside = authority.issue("127.0.0.1", file="https"), f"127.0.0.1:{free_port()}"
    gateway = authority.issue("a-gateway")
    with StubServices() as services:
        settings = RouterSettings(
            port=0,
            workers=services.worker_addresses,
            cache_address=f"127.0.0.1:{services.cache_port}",
            http_tls_cert_file=own.cert,
            http_tls_key_file=own.key,
            http_tls_client_ca_file=authority.ca_file,
            operations_address=beside,
        )
        with RunningRouter(services, settings) as url:
            wait_until(lambda: httpx2.get(f"http://{beside}/health/ready").status_code == 200)
            assert "hypic_num_requests_running" in httpx2.get(f"http://{beside}/metrics").text
            assert httpx2.post(f"http://{beside}{CHAT}", json=BODY).status_code == 404
            secure = url.replace("http:", "https:")
            context = ssl.create_default_context(cafile=str(authority.ca_file))
            with pytest.raises(httpx2.TransportError):
                httpx2.post(f"{secure}{CHAT}", json=BODY, verify=context)
            context.load_cert_chain(gateway.cert, gateway.key)
            assert httpx2.post(f"{secure}{CHAT}", json=BODY, verify=context).status_code == 200
            assert httpx2.get(f"{secure}/metrics", verify=context).status_code == 404
            foreign = ssl.create_default_context(cafile=str(authority.ca_file))
            stranger = other.issue("a-gateway")
            foreign.load_cert_chain(stranger.cert, stranger.key)
            with pytest.raises(httpx2.TransportError):
                httpx2.post(f"{secure}{CHAT}", json=BODY, verify=foreign)


def test_settings_take_all_files_or_none(served: CertificateFiles, authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="set all of tls_cert_file, tls_key_file and tls_ca_file"):
        RouterSettings.from_environment(tls_cert_file=served.cert)
    with pytest.raises(SettingsError, match=r"nowhere\.pem: No such file"):
        RouterSettings.from_environment(**{**served.settings(), "tls_ca_file": tmp_path / "nowhere.pem"})
    stranger = authority.issue("stranger")
    with pytest.raises(SettingsError, match="are no certificate and its key"):
        RouterSettings.from_environment(**{**served.settings(), "tls_key_file": stranger.key})
    with pytest.raises(SettingsError, match="http_tls_cert_file and http_tls_key_file together"):
        RouterSettings.from_environment(http_tls_cert_file=served.cert)
