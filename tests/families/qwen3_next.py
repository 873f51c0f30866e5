"""Qwen3-Next."""

from tests.families.qwen_hybrid import HEADS, hybrid_variants

__all__ = ["VARIANTS"]

_STANDARD = {
    **HEADS,
    "intermediate_size": 40,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 20,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "tie_word_embeddings": False,
}
_ATTENTION_FIRST = {
    **_STANDARD,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 2,
    "layer_types": ["full_attention", "linear_attention"],
    "tie_word_embeddings": True,
}

VARIANTS = hybrid_variants(
    "Qwen3Next", {"qwen3_next-standard": _STANDARD, "qwen3_next-attention-first": _ATTENTION_FIRST}
)
