"""The revision of a model, as headers of states name it."""

from pathlib import Path

from blake3 import blake3

__all__ = ["WEIGHTS_SUFFIX", "checkpoint_revision"]

WEIGHTS_SUFFIX = ".safetensors"


def checkpoint_revision(directory: Path) -> str:
    """Hexadecimal BLAKE3 over config and weights, so that swapped weights never meet old states.

    Raises:
        OSError: a file cannot be read.
    """
    digest = blake3((directory / "config.json").read_bytes())
    for path in sorted(directory.glob(f"*{WEIGHTS_SUFFIX}")):
        digest.update(path.name.encode())
        # Opened here: the library's own error names no file.
        with path.open("rb") as weights:
            digest.update_mmap(weights.name)
    return digest.hexdigest()
