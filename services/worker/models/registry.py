"""From a checkpoint directory to its family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.worker.mixers.state import DeviceMemory
from services.worker.models import kimi_linear, llama, minimax, qwen3_5, qwen3_next, ring
from services.worker.models.checkpoint import Checkpoint, CheckpointDirectory, read_json
from services.worker.models.decoder import Model
from services.worker.models.errors import CheckpointError
from services.worker.models.quantisation import read_block_scales
from services.worker.models.random_weights import RandomWeights
from services.worker.models.spec import ModelSpec

__all__ = ["FAMILIES", "Family", "draw_model", "find_family", "load_checkpoint", "read_checkpoint_spec"]


@dataclass(frozen=True, slots=True)
class Family:
    """How one family reads a config and loads weights."""

    model_types: frozenset[str]
    read_spec: Callable[[Mapping[str, Any]], ModelSpec]
    load_model: Callable[[ModelSpec, Checkpoint, DeviceMemory], Model]


FAMILIES = (
    Family(qwen3_5.MODEL_TYPES, qwen3_5.read_spec, qwen3_5.load_model),
    Family(qwen3_next.MODEL_TYPES, qwen3_next.read_spec, qwen3_next.load_model),
    Family(llama.MODEL_TYPES, llama.read_spec, llama.load_model),
    Family(kimi_linear.MODEL_TYPES, kimi_linear.read_spec, kimi_linear.load_model),
    Family(minimax.MODEL_TYPES, minimax.read_spec, minimax.load_model),
    Family(ring.MODEL_TYPES, ring.read_spec, ring.load_model),
)


def find_family(directory: Path, config: Mapping[str, Any]) -> Family:
    """The family that serves a config.

    Raises:
        CheckpointError: none does, or its weights are quantised in a way that no family supports.
    """
    read_block_scales(config)
    model_type = config.get("model_type")
    for family in FAMILIES:
        # Not a set's own test: JSON has values that cannot be hashed.
        if any(model_type == known for known in family.model_types):
            return family
    known = ", ".join(sorted(name for family in FAMILIES for name in family.model_types))
    raise CheckpointError(
        f"{directory / 'config.json'}: model_type {model_type!r} is not supported; use one of {known}"
    )


def read_checkpoint_spec(directory: Path) -> ModelSpec:
    """The shapes of a checkpoint, without its weights.

    Raises:
        CheckpointError: `config.json` is missing, damaged or not supported.
    """
    config = read_json(directory / "config.json")
    return find_family(directory, config).read_spec(config)


def draw_model(directory: Path, memory: DeviceMemory, seed: int, num_layers: int | None = None) -> Model:
    """The shapes of a checkpoint, or of its first layers, with random weights; needs its `config.json` alone.

    Raises:
        CheckpointError: the config cannot be served.
    """
    config = read_json(directory / "config.json")
    family = find_family(directory, config)
    spec = family.read_spec(config)
    first = replace(spec, layers=spec.layers[:num_layers])
    return family.load_model(first, RandomWeights(memory.device, seed), memory)


def load_checkpoint(directory: Path, memory: DeviceMemory) -> Model:
    """Load a model; its pools are allocated from `memory`.

    Raises:
        CheckpointError: the checkpoint cannot be served.
    """
    config = read_json(directory / "config.json")
    family = find_family(directory, config)
    spec = family.read_spec(config)
    with CheckpointDirectory(directory, read_block_scales(config)) as checkpoint:
        return family.load_model(spec, checkpoint, memory)
