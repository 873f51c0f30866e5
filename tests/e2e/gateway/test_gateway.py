"""nginx as it is shipped in `deploy/gateway`, ahead of two routers that want its certificate."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from string import Template
from typing import Any

import httpx2
import pytest

from services.cli.ports import free_port
from services.router.settings import RouterSettings
from tests.certificates import Authority, CertificateFiles
from tests.e2e.stack.asking import CHAT, read_stream
from tests.router_stack import RunningRouter, StubServices, wait_until
from tests.stub_worker import MODEL_NAME

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin") or ""
TEMPLATE = Path(__file__).parents[3] / "deploy" / "gateway" / "nginx.conf"
BODY: dict[str, Any] = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 4}

pytestmark = pytest.mark.skipif(not NGINX, reason="nginx is not installed")


@contextmanager
def gateway(folder: Path, held: CertificateFiles, routers: tuple[str, str]) -> Iterator[str]:
    """nginx in the foreground; its URL."""
    folder.mkdir()
    listen = f"127.0.0.1:{free_port()}"
    names = {"LISTEN": listen, "ROUTER_A": routers[0], "ROUTER_B": routers[1], "RUN": str(folder)}
    names |= {"CERT_FILE": str(held.cert), "KEY_FILE": str(held.key), "CA_FILE": str(held.ca)}
    (folder / "nginx.conf").write_text(Template(TEMPLATE.read_text()).safe_substitute(names))
    # As root its workers would take another user, who may not look into the folders of tests.
    directives = "daemon off; user root;" if Path(folder).owner() == "root" else "daemon off;"
    command = [
        NGINX,
        "-p",
        str(folder),
        "-c",
        str(folder / "nginx.conf"),
        "-e",
        str(folder / "error.log"),
        "-g",
        directives,
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: process.poll() is None and answers(f"http://{listen}/"))
            yield f"http://{listen}"
        finally:
            process.terminate()


def answers(url: str) -> bool:
    try:
        return httpx2.get(url).status_code == 404
    except httpx2.TransportError:
        return False


class Site:
    """Two routers over stubs, one authority for all."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "authority")
        self.services = StubServices()
        self._held = self.authority.issue("hypic-router")

    def router(self, workers: str = "") -> RunningRouter:
        own = self._held
        settings = RouterSettings(
            port=0,
            workers=workers or self.services.worker_addresses,
            cache_address=f"127.0.0.1:{self.services.cache_port}",
            http_tls_cert_file=own.cert,
            http_tls_key_file=own.key,
            http_tls_client_ca_file=own.ca,
            worker_wait_seconds=0.1,
        )
        return RunningRouter(self.services, settings)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"))
    with site.services:
        yield site


@pytest.fixture(scope="module")
def url(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    held = site.authority.issue("a-gateway")
    folder = tmp_path_factory.mktemp("nginx") / "run"
    with (
        site.router() as first,
        site.router() as second,
        gateway(folder, held, (place(first), place(second))) as url,
    ):
        wait_until(lambda: all(post(url).status_code == 200 for _ in range(4)))
        yield url


def place(url: str) -> str:
    return url.partition("//")[2]


def post(url: str, **more: Any) -> httpx2.Response:  # noqa: ANN401 # arguments of httpx2
    arguments: dict[str, Any] = {"json": BODY, "timeout": 30, **more}
    return httpx2.post(f"{url}{CHAT}", **arguments)


def test_tokens_go_on_as_they_come(site: Site, url: str) -> None:
    """The first is here while the worker is still at the others."""
    worker = site.services.worker
    worker.token_delay_seconds = 0.2
    try:
        with httpx2.stream(
            "POST", f"{url}{CHAT}", json=BODY | {"stream": True, "max_tokens": 20}, timeout=30
        ) as response:
            lines = response.iter_lines()
            first = read_stream(lines, until_texts=1)
            assert (first.is_ended, worker.num_running) == (False, 1)
            assert read_stream(lines).is_ended
    finally:
        worker.token_delay_seconds = 0.0
    assert response.headers["content-type"].startswith("text/event-stream")


def test_what_is_too_large_ends_at_the_edge(site: Site, url: str) -> None:
    before = len(site.services.worker.requests)
    assert post(url, headers={"x-large": "x" * (80 << 10)}).status_code in (400, 431)
    assert post(url, json=None, content=b"x" * (33 << 20)).status_code == 413
    assert len(site.services.worker.requests) == before


def test_the_api_alone_is_open(url: str) -> None:
    for path in ("/metrics", "/console", "/admin/evictions", "/health/ready", "/"):
        assert httpx2.get(f"{url}{path}").status_code == 404
    assert httpx2.get(f"{url}/v1/models").json()["data"][0]["id"] == MODEL_NAME


def test_request_ids_pass(url: str) -> None:
    assert post(url, headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    assert len(post(url).headers["x-request-id"]) == 32


def test_errors_of_the_router_pass_as_they_are(url: str) -> None:
    refused = post(url, json=BODY | {"temperature": -1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
    assert refused.headers["x-should-retry"] == "false"


def test_a_router_that_ends_or_has_no_worker_costs_no_request(site: Site, tmp_path: Path) -> None:
    held = site.authority.issue("a-gateway")
    leaving = site.router()
    with site.router() as good, site.router(workers="127.0.0.1:9") as lonely, leaving as third:
        for name, other in (("lonely", lonely), ("leaving", third)):
            with gateway(tmp_path / name, held, (place(other), place(good))) as url:
                wait_until(lambda: all(post(url).status_code == 200 for _ in range(4)))  # called at once
                if other is third:
                    leaving.stop()
                assert [post(url).status_code for _ in range(8)] == [200] * 8


def test_a_gateway_without_the_right_certificate_gets_nothing(site: Site, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "other").issue("a-gateway")
    believing = CertificateFiles(stranger.cert, stranger.key, site.authority.ca_file)
    before = len(site.services.worker.requests)
    with site.router() as first, gateway(tmp_path / "run", believing, (place(first), place(first))) as url:
        assert post(url).status_code in (400, 502)
    assert len(site.services.worker.requests) == before
