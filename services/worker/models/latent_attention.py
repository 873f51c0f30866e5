"""Multi-head latent attention as configs and checkpoints of several families describe it (DeepSeek-V2's names)."""

from services.worker.mixers.latent_attention import LatentAttentionShape, LatentAttentionWeights
from services.worker.models.fields import ConfigFields
from services.worker.models.weights import WeightReader

__all__ = ["read_latent_shape", "read_latent_weights"]


def read_latent_shape(fields: ConfigFields, rotary_theta: float | None, eps: float) -> LatentAttentionShape:
    """The layer's shape; `q_lora_rank` null or missing means queries without a latent.

    Raises:
        CheckpointError: a field is missing or wrong.
    """
    fields.choice("attention_bias", [False], False)
    heads = fields.few("num_attention_heads")
    fields.choice("num_key_value_heads", [heads], heads)
    return LatentAttentionShape(
        num_heads=heads,
        nope_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        latent_dim=fields.integer("kv_lora_rank"),
        query_rank=fields.optional_integer("q_lora_rank"),
        rotary_theta=rotary_theta,
        eps=eps,
    )


def read_latent_weights(
    reader: WeightReader, name: str, shape: LatentAttentionShape, hidden: int, out_proj: str = "o_proj"
) -> LatentAttentionWeights:
    """The weights of this rank's heads under a name; `kv_b_proj` `[H · (nope_dim + value_dim), C]` is cut into its two products.

    Raises:
        CheckpointError: a tensor is missing, damaged, or of the wrong shape.
    """
    queries = shape.num_heads * shape.query_dim
    rank, values = shape.query_rank, shape.num_heads * shape.value_dim
    query_rows = {"q_proj": reader.rows(queries)} if rank is None else {"q_a_proj": reader.all_rows(rank)}
    rows = {**query_rows, "kv_a_proj_with_mqa": reader.all_rows(shape.latent_dim + shape.rope_dim)}
    expanded = shape.nope_dim + shape.value_dim
    up_rows = reader.rows(shape.num_heads * expanded)
    up = reader.read(f"{name}.kv_b_proj.weight", up_rows.length, shape.latent_dim, cut=up_rows)
    key_up, value_up = up.unflatten(0, (-1, expanded)).split([shape.nope_dim, shape.value_dim], dim=1)
    return LatentAttentionWeights(
        in_proj=reader.stack({f"{name}.{part}.weight": taken for part, taken in rows.items()}, hidden),
        latent_norm=reader.read_fp32(f"{name}.kv_a_layernorm.weight", shape.latent_dim),
        key_up=key_up.contiguous(),
        value_up=value_up.transpose(1, 2).contiguous(),
        out_proj=reader.read(f"{name}.{out_proj}.weight", hidden, values, cut=reader.columns(values)),
        query_norm=reader.read_fp32(f"{name}.q_a_layernorm.weight", rank) if rank else None,
        query_up=reader.read(f"{name}.q_b_proj.weight", queries, rank, cut=reader.rows(queries)) if rank else None,
    )
