"""Generates the Python modules of proto/ in place. With --check: fails when the committed ones are out of date."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent / "proto"


def generate(target: Path) -> list[Path]:
    """Write modules and stubs below `target`; returns their paths relative to it."""
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    # protoc looks for its mypy plugins on the path; they lie beside the running interpreter.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    include = Path(protoc.__file__).parent / "_proto"
    status = protoc.main(["protoc", f"-I{ROOT}", f"-I{include}", *outputs, *sources])
    if status:
        raise SystemExit(f"protoc failed with status {status}")
    return sorted(path.relative_to(target) for path in target.rglob("*_pb2*.py*") if "__pycache__" not in path.parts)


def main() -> None:
    """Parse the arguments and generate or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        stale = [
            str(path)
            for path in generate(fresh)
            if not (ROOT / path).exists() or (ROOT / path).read_bytes() != (fresh / path).read_bytes()
        ]
    if stale:
        sys.exit(f"out of date, run `make proto`: {', '.join(stale)}")


if __name__ == "__main__":
    main()
