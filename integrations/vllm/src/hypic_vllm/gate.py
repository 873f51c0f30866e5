"""Refuses engines whose memory the connector does not know, at their start and with the reason."""

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["SUPPORTED_VERSIONS", "EngineFacts", "GroupFacts", "UnsupportedEngineError", "check_engine"]

# Each is tested whole; another one may keep its memory otherwise.
SUPPORTED_VERSIONS = ("0.32.0",)
_ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
_CACHE_MODES = ("none", "align")
_BLOCK_MULTIPLE = 32


class UnsupportedEngineError(ValueError):
    """vLLM runs in a way in which the connector would load wrong bytes; the message says what to change."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One KV cache group. kind: `attention`, `recurrent`, or the name of another spec; dtypes: without `torch.`.

    shapes: of a recurrent layer's states; cache_mode, extra_blocks: of recurrent groups.
    """

    kind: str
    block_size: int
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    cache_mode: str = ""
    extra_blocks: int = 0


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What decides how vLLM keeps keys, values and states."""

    version: str
    device: str
    architectures: tuple[str, ...]
    model_dtype: str
    cache_dtype: str
    ranks: int
    has_speculation: bool
    has_hybrid_manager: bool
    conv_layout: str
    key_value_layout: str
    kv_role: str
    load_failure_policy: str
    has_second_runner: bool
    groups: tuple[GroupFacts, ...]


def check_engine(facts: EngineFacts) -> None:
    """Check every fact.

    Raises:
        UnsupportedEngineError: one is not known to work; all that are not are named.
    """
    if faults := list(_faults(facts)):
        raise UnsupportedEngineError("hypic-vllm cannot serve this engine: " + "; ".join(faults))


def _faults(facts: EngineFacts) -> Iterator[str]:
    if facts.version not in SUPPORTED_VERSIONS:
        yield f"vLLM {facts.version} is not tested, only {', '.join(SUPPORTED_VERSIONS)}"
    if facts.device != "cpu":
        yield f"device is {facts.device}, and only the memory of the CPU build is known"
    if not set(facts.architectures) & set(_ARCHITECTURES):
        yield f"the model is {', '.join(facts.architectures)}, and only {', '.join(_ARCHITECTURES)} are known"
    if facts.model_dtype != "bfloat16" or facts.cache_dtype not in ("auto", "bfloat16"):
        yield f"dtype is {facts.model_dtype} and kv_cache_dtype {facts.cache_dtype}; both must be bfloat16"
    if facts.ranks != 1:
        yield f"the model is split over {facts.ranks} ranks; states are whole, so every parallel size must be 1"
    if facts.has_speculation:
        yield "speculative decoding changes the shape of recurrent states; leave it out"
    if not facts.has_hybrid_manager:
        yield "disable_hybrid_kv_cache_manager is true; it must be false"
    if facts.conv_layout != "SD":
        yield f"the layout of convolution states is {facts.conv_layout}, not SD; unset VLLM_SSM_CONV_STATE_LAYOUT"
    if facts.key_value_layout != "LBHNC":
        yield f"the layout of keys and values is {facts.key_value_layout}, not LBHNC"
    if facts.kv_role != "kv_consumer":
        yield f"kv_role is {facts.kv_role}; it must be kv_consumer, since nothing is given away"
    if facts.load_failure_policy != "recompute":
        yield f"kv_load_failure_policy is {facts.load_failure_policy}; with recompute a lost state costs time, no answer"
    if facts.has_second_runner:
        yield "the second model runner (VLLM_USE_V2_MODEL_RUNNER) is not tested"
    for index, group in enumerate(facts.groups):
        yield from (f"KV cache group {index}: {fault}" for fault in _group_faults(group))
    if {group.kind for group in facts.groups} != {"attention", "recurrent"}:
        yield "the model must have both recurrent and full-attention layers"


def _group_faults(group: GroupFacts) -> Iterator[str]:
    if group.kind == "attention":
        if group.block_size % _BLOCK_MULTIPLE:
            yield f"block size {group.block_size} is no multiple of {_BLOCK_MULTIPLE}"
        if group.dtypes != ("bfloat16",):
            yield f"keys and values are {', '.join(group.dtypes)}, not bfloat16"
    elif group.kind == "recurrent":
        if group.cache_mode not in _CACHE_MODES:
            yield f"mamba_cache_mode is {group.cache_mode}, and only {', '.join(_CACHE_MODES)} are known"
        if group.dtypes != ("bfloat16", "float32"):
            yield f"states are {', '.join(group.dtypes)}, not bfloat16, float32 (set mamba_ssm_cache_dtype to float32)"
        if [len(shape) for shape in group.shapes] != [2, 3]:
            yield f"states have the shapes {group.shapes}, not [taps, channels] and [heads, V, K]"
        if group.extra_blocks:
            yield f"{group.extra_blocks} further blocks a request are not known"
    else:
        yield f"it is of the kind {group.kind}"
