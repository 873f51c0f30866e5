"""Qwen3.5, dense and with experts."""

from tests.families.qwen_hybrid import HEADS, hybrid_variants

__all__ = ["VARIANTS"]

_STANDARD = {
    **HEADS,
    "intermediate_size": 80,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "tie_word_embeddings": True,
}
_ATTENTION_FIRST = {
    **_STANDARD,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["full_attention", "linear_attention", "full_attention"],
    "tie_word_embeddings": False,
}
_WIDE_GROUPS = {
    **_STANDARD,
    "num_key_value_heads": 1,
    "linear_num_value_heads": 6,
    "linear_conv_kernel_dim": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_EXPERTS = {
    **HEADS,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 20,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "tie_word_embeddings": False,
}
_ALL_EXPERTS = {
    **_EXPERTS,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "num_experts": 3,
    "num_experts_per_tok": 3,
    "layer_types": ["full_attention", "linear_attention"],
    "tie_word_embeddings": True,
}

VARIANTS = (
    *hybrid_variants(
        "Qwen3_5",
        {
            "qwen3_5-standard": _STANDARD,
            "qwen3_5-attention-first": _ATTENTION_FIRST,
            "qwen3_5-wide-groups": _WIDE_GROUPS,
        },
    ),
    *hybrid_variants("Qwen3_5Moe", {"qwen3_5_moe-standard": _EXPERTS, "qwen3_5_moe-attention-first": _ALL_EXPERTS}),
)
