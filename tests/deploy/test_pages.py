"""The page for operators names what is there."""

import re
import shutil
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from services.common.tls import TlsFiles, check_files
from tests.deploy.rendering import KUBERNETES, OVERLAYS, ROOT
from tests.deploy.schemas import versions
from tests.deploy.wiring_checks import OUTSIDE_SECRETS

_PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


def test_every_overlay_and_component_has_its_row() -> None:
    components = {path.name for path in (KUBERNETES / "components").iterdir()}
    assert {path.name for path in (KUBERNETES / "overlays").iterdir()} == set(OVERLAYS)
    assert {*components, *OVERLAYS} <= set(re.findall(r"^\| `([\w-]+)` \|", _PAGE, re.MULTILINE))


def test_every_secret_has_its_command() -> None:
    page = " ".join(_PAGE.replace("$service", service) for service in ("router", "cache", "worker"))
    for secret, keys in OUTSIDE_SECRETS.items():
        commands = " ".join(re.findall(rf"kubectl -n hypic create secret generic {secret} (.*)", page))
        assert keys == set(re.findall(r"--from-(?:literal|file)=([\w.]+)", commands))


def test_the_versions_are_those_that_are_checked() -> None:
    assert f"Kubernetes {versions()[0]} to {versions()[-1]}" in _PAGE


def test_variables_that_the_page_names_are_set_or_known() -> None:
    known = (ROOT / "docs" / "configuration.md").read_text()
    for name in set(re.findall(r"HYPIC_[A-Z_]+", _PAGE)):
        assert f"`{name}`" in known, name


def test_the_custom_kinds_that_are_rendered_have_their_row_beside_the_schemas() -> None:
    schemas = ROOT / "deploy" / "schemas"
    kinds = {path.stem.rpartition("-")[2] for path in schemas.glob("*.json")}
    listed = set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w+|\bHTTPRoute", (schemas / "README.md").read_text()))
    assert kinds <= listed


def test_components_are_components() -> None:
    for path in (KUBERNETES / "components").glob("*/kustomization.yaml"):
        assert yaml.safe_load(path.read_text())["kind"] == "Component"


def test_the_certificates_that_the_page_makes_are_those_that_the_services_want(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no program openssl")
    (commands,) = re.findall(r"```\n(openssl .*?)```", _PAGE, re.DOTALL)
    kept = "kubectl() { mkdir $6 && cp tls.crt tls.key ca.crt $6; }\n"
    subprocess.run(["bash", "-ec", kept + commands], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    for service in ("router", "cache", "worker"):
        folder = tmp_path / f"hypic-tls-{service}"
        check_files(TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt"))
        _shake_hands(folder, f"hypic-{service}")
        with pytest.raises(ssl.SSLCertVerificationError):
            _shake_hands(folder, "hypic-other")


def _shake_hands(folder: Path, name: str) -> None:
    """A handshake in memory, both sides with the folder's files."""
    sides = []
    for purpose in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        context = ssl.SSLContext(purpose)
        context.load_verify_locations(folder / "ca.crt")
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        context.verify_mode = ssl.CERT_REQUIRED
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        is_server = purpose is ssl.PROTOCOL_TLS_SERVER
        wrapped = context.wrap_bio(incoming, outgoing, is_server, None if is_server else name)
        sides.append((wrapped, incoming, outgoing))
    for _ in range(4):
        for (wrapped, _, outgoing), (_, incoming, _) in (sides, reversed(sides)):
            with suppress(ssl.SSLWantReadError):
                wrapped.do_handshake()
            incoming.write(outgoing.read())
    assert all(wrapped.version() for wrapped, _, _ in sides)
