"""Rendered once for all tests: every overlay, production with the components that it leaves out, development with TLS."""

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from tests.deploy.rendering import KUBERNETES, OVERLAYS, ROOT, Manifest, kustomize
from tests.deploy.schemas import remember_schemas


@pytest.fixture(scope="session")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[Manifest]]:
    """By name of the overlay; `all`, `dev-tls` and `mine` are made here."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: scripts/install_kubectl.py brings it")
    found = {name: kustomize(KUBERNETES / "overlays" / name) for name in OVERLAYS}
    folder = tmp_path_factory.mktemp("overlay")
    # Kustomize follows relative paths only, and no link out of a folder.
    shutil.copytree(KUBERNETES.parent, folder / "deploy")
    found["all"] = kustomize(_with_components(folder, "prod", _left_out("prod")))
    found["dev-tls"] = kustomize(_with_components(folder, "dev", ["tls"]))
    found["mine"] = kustomize(_of_the_page(folder))
    return found


def _of_the_page(folder: Path) -> Path:
    """The overlay that docs/kubernetes.md gives as an example."""
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL)
    made = folder / "deploy" / "k8s" / "overlays" / "mine"
    made.mkdir()
    (made / "kustomization.yaml").write_text(text)
    return made


def _left_out(overlay: str) -> list[str]:
    """Components that an overlay has not, but for Redis, which is inside or outside of the cluster."""
    listed = yaml.safe_load((KUBERNETES / "overlays" / overlay / "kustomization.yaml").read_text())["components"]
    used = {"redis", *(Path(each).name for each in listed)}
    return sorted({path.name for path in (KUBERNETES / "components").iterdir()} - used)


def _with_components(folder: Path, overlay: str, components: list[str]) -> Path:
    made = folder / "deploy" / "k8s" / "overlays" / f"{overlay}-and-more"
    made.mkdir()
    added = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"../{overlay}"],
        "components": [f"../../components/{each}" for each in components],
    }
    (made / "kustomization.yaml").write_text(yaml.safe_dump(added))
    return made


@pytest.fixture(scope="module")
def _remembered_schemas() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        remember_schemas(patch)
        yield
