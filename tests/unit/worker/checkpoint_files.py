"""Changes to the files of a checkpoint directory, as releases differ and as downloads go wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from services.worker.engine.combine_plan import CombinePart
from services.worker.engine.context import CaptureProfile
from services.worker.engine.seam import SeamWindow
from tests.exactness.rig import PassRig, create_context

__all__ = ["Tensors", "edit_config", "edit_tensors", "fuse_experts", "last_logits", "shard_weights"]

Tensors = dict[str, torch.Tensor]
_WEIGHTS = "model.safetensors"


def last_logits(directory: Path, device: torch.device, token_ids: tuple[int, ...]) -> torch.Tensor:
    """The engine's logits `[vocabulary]` behind a prompt, from the files as they are."""
    rig = PassRig(create_context(directory, device, CaptureProfile(SeamWindow(4), ())))
    return rig.logits(CombinePart(token_ids))


def edit_config(directory: Path, **changes: Any) -> None:  # noqa: ANN401 # any JSON
    """Set fields of `config.json`; None takes a field out."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def edit_tensors(directory: Path, edit: Callable[[Tensors], None]) -> None:
    """Change the tensors of an unsharded checkpoint in place."""
    tensors = load_file(directory / _WEIGHTS)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / _WEIGHTS)


def shard_weights(directory: Path) -> None:
    """The same weights in three shards with an index."""
    tensors = load_file(directory / _WEIGHTS)
    (directory / _WEIGHTS).unlink()
    weight_map = {}
    for shard in range(3):
        file = f"model-0000{shard + 1}-of-00003.safetensors"
        chosen = {name: tensor for index, (name, tensor) in enumerate(sorted(tensors.items())) if index % 3 == shard}
        save_file(chosen, directory / file)
        weight_map.update(dict.fromkeys(chosen, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def fuse_experts(tensors: Tensors) -> None:
    """Qwen's experts from one by one to one tensor a layer, as its bf16 releases keep them."""
    first = ".experts.0.gate_proj.weight"
    for block in [name.removesuffix(first) for name in tensors if name.endswith(first)]:
        count = sum(name.startswith(f"{block}.experts.") and ".gate_proj." in name for name in tensors)
        gate, up, down = (
            torch.stack([tensors.pop(f"{block}.experts.{expert}.{part}_proj.weight") for expert in range(count)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{block}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{block}.experts.down_proj"] = down
