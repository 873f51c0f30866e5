"""Reads from vLLM's own objects what the gate and the loader need."""

import re
from dataclasses import dataclass
from typing import Any

import torch
import vllm
import vllm.envs
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

from hypic_vllm.gate import EngineFacts, GroupFacts
from hypic_vllm.loading import EngineMemory, GroupMemory

__all__ = ["read_facts", "read_memory"]

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_GATED_DELTA = "GDN_ATTN"


def read_facts(config: VllmConfig, cache: KVCacheConfig) -> EngineFacts:
    """What the gate decides on."""
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    return EngineFacts(
        version=vllm.__version__.partition("+")[0],
        device=current_platform.device_type,
        architectures=tuple(config.model_config.architectures),
        model_dtype=_name(config.model_config.dtype),
        cache_dtype=config.cache_config.cache_dtype,
        ranks=parallel.world_size * parallel.data_parallel_size,
        has_speculation=config.speculative_config is not None,
        has_hybrid_manager=not config.scheduler_config.disable_hybrid_kv_cache_manager,
        conv_layout=get_conv_state_layout(),
        key_value_layout=str(cache.kv_cache_layout).rpartition(".")[2],
        kv_role=str(transfer.kv_role),
        load_failure_policy=transfer.kv_load_failure_policy,
        has_second_runner=bool(vllm.envs.VLLM_USE_V2_MODEL_RUNNER),
        groups=tuple(_group_facts(group) for group in cache.kv_cache_groups),
    )


def read_memory(config: VllmConfig, cache: KVCacheConfig) -> EngineMemory:
    """Where the engine keeps every layer's keys, values and states, once it has allocated them."""
    layers = config.compilation_config.static_forward_context
    groups, attention, linear = [], {}, {}
    for group in cache.kv_cache_groups:
        kind = _kind(group)
        indices = tuple(_layer_index(name) for name in group.layer_names)
        groups.append(GroupMemory(kind, group.kv_cache_spec.block_size, indices))
        for name, index in zip(group.layer_names, indices, strict=True):
            if kind == "attention":
                attention[index] = LayerMemory(layers[name], layers[name].kv_cache)
            else:
                linear[index] = tuple(layers[name].kv_cache)
    return EngineMemory(tuple(groups), attention, linear)


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """One attention layer and its cache `[blocks, …]`. See `AttentionMemory`."""

    layer: Any
    cache: torch.Tensor

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, last_block: int) -> None:
        """See `AttentionMemory`: by the layer's own way in, which knows how its kernels want a block."""
        self.cache[last_block].zero_()
        self.layer.impl.do_kv_cache_update(self.layer, keys, values, self.cache, slots)


def _layer_index(name: str) -> int:
    (found,) = _LAYER.findall(name)
    return int(found)


def _kind(group: KVCacheGroupSpec) -> str:
    spec = group.kv_cache_spec
    if type(spec) is FullAttentionSpec and spec.sliding_window is None and spec.attention_chunk_size is None:
        return "attention"
    if type(spec) is MambaSpec and spec.mamba_type.name == _GATED_DELTA:
        return "recurrent"
    return type(spec).__name__


def _group_facts(group: KVCacheGroupSpec) -> GroupFacts:
    kind, spec = _kind(group), group.kv_cache_spec
    if kind == "attention":
        return GroupFacts(kind, spec.block_size, (_name(spec.dtype),))
    if kind == "recurrent":
        return GroupFacts(
            kind,
            spec.block_size,
            tuple(_name(dtype) for dtype in spec.dtypes),
            tuple(tuple(shape) for shape in spec.shapes),
            spec.mamba_cache_mode,
            spec.num_speculative_blocks + spec.num_prefill_checkpoint_blocks,
        )
    return GroupFacts(kind, spec.block_size, ())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
