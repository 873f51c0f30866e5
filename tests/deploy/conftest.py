"""Rendered once for all tests: every overlay, and the production overlay with every component that it leaves out."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from tests.deploy.rendering import KUBERNETES, OVERLAYS, Manifest, kustomize
from tests.deploy.schemas import remember_schemas


@pytest.fixture(scope="session")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[Manifest]]:
    """By name of the overlay; `all` is production with all components beside each other."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: scripts/install_kubectl.py brings it")
    found = {name: kustomize(KUBERNETES / "overlays" / name) for name in OVERLAYS}
    everything = _with_all_components(tmp_path_factory.mktemp("overlay"))
    return {**found, "all": kustomize(everything)}


def _with_all_components(folder: Path) -> Path:
    """Kustomize follows relative paths only, and no link out of a folder."""
    shutil.copytree(KUBERNETES.parent, folder / "deploy")
    overlay = folder / "deploy" / "k8s" / "overlays" / "all"
    overlay.mkdir()
    listed = yaml.safe_load((KUBERNETES / "overlays" / "prod" / "kustomization.yaml").read_text())["components"]
    others = sorted(
        {path.name for path in (KUBERNETES / "components").iterdir()} - {Path(each).name for each in listed}
    )
    # A cluster has the Redis inside or outside of it.
    others.remove("redis")
    added = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../prod"],
        "components": [f"../../components/{each}" for each in others],
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(added))
    return overlay


@pytest.fixture(scope="module")
def _remembered_schemas() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        remember_schemas(patch)
        yield
