"""Writes the checkpoint in the public format, whole or in pieces, and joins pieces."""

import argparse
import json
from pathlib import Path

from safetensors.torch import save_file

from train.shape import ModelShape, Weights, public_config, public_state

_PIECE_BYTES = 13 * 2**20
_WEIGHTS_FILE = "model.safetensors"


def export(folder: Path, shape: ModelShape, weights: Weights, end_of_text: int, message_end: int) -> None:
    """Writes `model.safetensors`, `config.json` and `generation_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    state = public_state(shape, weights)
    save_file(state, folder / _WEIGHTS_FILE, metadata={"format": "pt"})
    config = public_config(shape, end_of_text, message_end)
    generation = {"do_sample": False, "eos_token_id": message_end, "pad_token_id": end_of_text}
    for name, values in (("config", config), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n")


def cut_weights(folder: Path) -> None:
    """Replaces the weights file by numbered pieces, for transports that limit a file's size."""
    path = folder / _WEIGHTS_FILE
    data = path.read_bytes()
    for number, start in enumerate(range(0, len(data), _PIECE_BYTES)):
        piece = data[start : start + _PIECE_BYTES]
        (folder / f"{_WEIGHTS_FILE}.part{number}").write_bytes(piece)
    path.unlink()


def join_weights(source: Path, target: Path) -> None:
    """Joins the pieces in `source` into the weights file in `target`."""
    pieces = sorted(source.glob(f"{_WEIGHTS_FILE}.part*"))
    if not pieces:
        raise FileNotFoundError(f"no {_WEIGHTS_FILE}.part* in {source}")
    (target / _WEIGHTS_FILE).write_bytes(b"".join(p.read_bytes() for p in pieces))


def main() -> None:
    """Joins pieces: `python -m train.export SOURCE TARGET`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="folder of the pieces")
    parser.add_argument("target", type=Path, help="folder of the checkpoint")
    arguments = parser.parse_args()
    join_weights(arguments.source, arguments.target)


if __name__ == "__main__":
    main()
