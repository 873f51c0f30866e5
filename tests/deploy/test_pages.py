"""The page for operators names what is there."""

import re

import yaml

from tests.deploy.rendering import KUBERNETES, OVERLAYS, ROOT
from tests.deploy.schemas import versions
from tests.deploy.wiring_checks import OUTSIDE_SECRETS

_PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


def test_every_overlay_and_component_has_its_row() -> None:
    components = {path.name for path in (KUBERNETES / "components").iterdir()}
    assert {path.name for path in (KUBERNETES / "overlays").iterdir()} == set(OVERLAYS)
    assert {*components, *OVERLAYS} <= set(re.findall(r"^\| `([\w-]+)` \|", _PAGE, re.MULTILINE))


def test_every_secret_has_its_command() -> None:
    for secret, keys in OUTSIDE_SECRETS.items():
        commands = " ".join(re.findall(rf"kubectl -n hypic create secret generic {secret} (.*)", _PAGE))
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
