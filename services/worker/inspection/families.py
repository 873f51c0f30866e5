"""What is known of the families that the worker loads: the table of `hypic models`."""

from dataclasses import dataclass

from services.worker.mixers.shapes import TransitionKind

__all__ = ["FAMILY_NOTES", "WEIGHT_FORMATS", "FamilyNotes", "unused_fields"]

_TRANSFORMERS = "transformers 5.24"
_OWN_REFERENCE = "own reference, from the published description"
_PREFIXES = "text or multimodal prefix; vision tower and prediction heads are left out"
_EXPERTS = "experts one by one or fused"
WEIGHT_FORMATS = (
    "safetensors, whole or in shards, in bf16, fp16 or fp32, or fp8 (e4m3) with block scales, dequantised when read"
)


@dataclass(frozen=True, slots=True)
class FamilyNotes:
    """One family, in words.

    name: as `ModelSpec.family` has it; linear_layers, transition: None where the family has no linear layer; verified_by: the
    public implementation, or the reference of our own, to which tests/exactness holds it; layouts: in which tensors may
    stand; unused_fields: what its configs say
    and public code does not read either.
    """

    name: str
    models: str
    model_types: tuple[str, ...]
    linear_layers: str | None
    transition: TransitionKind | None
    attention_layers: str
    feed_forward: str
    verified_by: str
    layouts: str = ""
    unused_fields: tuple[str, ...] = ()


FAMILY_NOTES = (
    FamilyNotes(
        name="qwen3_5",
        models="Qwen3.5 and Qwen3.6, dense",
        model_types=("qwen3_5", "qwen3_5_text"),
        linear_layers="gated delta",
        transition=TransitionKind.DENSE,
        attention_layers="grouped, gated",
        feed_forward="dense",
        verified_by=_TRANSFORMERS,
        layouts=_PREFIXES,
    ),
    FamilyNotes(
        name="qwen3_5_moe",
        models="Qwen3.5 and Qwen3.6, with experts",
        model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
        linear_layers="gated delta",
        transition=TransitionKind.DENSE,
        attention_layers="grouped, gated",
        feed_forward="experts",
        verified_by=_TRANSFORMERS,
        layouts=f"{_PREFIXES}; {_EXPERTS}",
    ),
    FamilyNotes(
        name="qwen3_next",
        models="Qwen3-Next",
        model_types=("qwen3_next",),
        linear_layers="gated delta",
        transition=TransitionKind.DENSE,
        attention_layers="grouped, gated",
        feed_forward="dense, experts",
        verified_by=_TRANSFORMERS,
        layouts=_EXPERTS,
        # Read where a layer is dense; the releases have none.
        unused_fields=("intermediate_size",),
    ),
    FamilyNotes(
        name="llama",
        models="Llama 2, Llama 3, SmolLM2",
        model_types=("llama",),
        linear_layers=None,
        transition=None,
        attention_layers="grouped",
        feed_forward="dense",
        verified_by=_TRANSFORMERS,
    ),
    FamilyNotes(
        name="qwen3",
        models="Qwen3 dense",
        model_types=("qwen3",),
        linear_layers=None,
        transition=None,
        attention_layers="grouped, normed",
        feed_forward="dense",
        verified_by=_TRANSFORMERS,
    ),
    FamilyNotes(
        name="kimi_linear",
        models="Kimi-Linear",
        model_types=("kimi_linear",),
        linear_layers="Kimi delta",
        transition=TransitionKind.DENSE,
        attention_layers="latent, no position",
        feed_forward="dense, experts",
        verified_by=_TRANSFORMERS,
        layouts=f"feed-forward under mlp or block_sparse_moe; {_EXPERTS}",
        # No layer has heads of so many channels, or rotary position; experts are always chosen by groups. transformers
        # saves what it derives from other fields.
        unused_fields=(
            "head_dim",
            "rope_theta",
            "rope_parameters",
            "use_grouped_topk",
            "linear_conv_kernel_dim",
            "linear_head_dim",
            "linear_num_heads",
            "qk_head_dim",
        ),
    ),
    FamilyNotes(
        name="minimax",
        models="MiniMax-M1, MiniMax-Text-01",
        model_types=("minimax", "minimax_m1", "MiniMaxM1", "minimax_text_01", "MiniMaxText01"),
        linear_layers="lightning",
        transition=TransitionKind.SCALAR,
        attention_layers="grouped",
        feed_forward="experts",
        verified_by=f"{_TRANSFORMERS} (released rotary_dim: own reference)",
        layouts=f"config fields as released or as transformers writes them; {_EXPERTS}",
        # Public code's blocks of tokens, and a mode of shared experts, of which there are none.
        unused_fields=("block_size", "shared_moe_mode"),
    ),
    FamilyNotes(
        name="ring_linear",
        models="Ring-linear-2.0, Ling-linear-2.0",
        model_types=("bailing_moe_linear",),
        linear_layers="lightning, rotary",
        transition=TransitionKind.SCALAR,
        attention_layers="grouped, normed",
        feed_forward="dense, experts",
        verified_by=_OWN_REFERENCE,
        layouts=f"released names; prediction layers are left out; {_EXPERTS}",
    ),
    FamilyNotes(
        name="ring_2_5",
        models="Ring-2.5, Ling-2.5",
        model_types=("bailing_hybrid",),
        linear_layers="lightning, rotary",
        transition=TransitionKind.SCALAR,
        attention_layers="latent",
        feed_forward="dense, experts",
        verified_by=_OWN_REFERENCE,
        layouts=f"released names; prediction layers are left out; {_EXPERTS}",
        # The sum of two other fields, and a limit of windows that no layer has.
        unused_fields=("qk_head_dim", "max_window_layers"),
    ),
)


def unused_fields(family: str) -> tuple[str, ...]:
    """See `FamilyNotes`."""
    return next((notes.unused_fields for notes in FAMILY_NOTES if notes.name == family), ())
