"""Fields of a config that no loader looked at, less those that are known to change nothing."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from services.worker.models.fields import RecordedConfig

__all__ = ["unknown_fields"]

# Where a config came from, how it was trained, and what this worker leaves out or reads elsewhere.
_HARMLESS = re.compile(
    r"architectures|auto_map|_name_or_path|name_or_path|transformers_version|(torch_)?dtype|model_type|id2label|label2id"
    r"|.*_token_id|.*dropout|.*_pdrop|initializer_range|.*_aux_loss_\w+|aux_loss_alpha|seq_aux|router_jitter_noise"
    r"|pretraining_tp|gradient_checkpointing|use_cache|return_dict|output_\w+|chunk_size_feed_forward|is_encoder_decoder"
    r"|use_mamba_kernels|router_dtype|problem_type|language_model_only"
    r"|modules_to_not_convert|ignored_layers|scale_fmt|vision_config|audio_config|mtp_\w+|num_nextn_predict_layers|mrope_\w+"
)
# These change the numbers, and say what the families compute anyway.
_HARMLESS_VALUES: Mapping[str, object] = {
    "mamba_ssm_dtype": "float32",
    "use_rmsnorm": True,
    "use_sliding_window": False,
    "is_decoder": True,
}
# What a field says is said by another one, which was looked at.
_SUPERSEDED_BY: Mapping[str, str] = {
    "full_attention_interval": "layer_types",
    "max_window_layers": "use_sliding_window",
    "partial_rotary_factor": "rope_parameters.partial_rotary_factor",
    "rope_theta": "rope_parameters.rope_theta",
}


def unknown_fields(config: Mapping[str, Any], recorded: RecordedConfig, unused: Sequence[str] = ()) -> tuple[str, ...]:
    """Dotted names, in the config's order, less the family's `unused` ones. A field that is null or empty says nothing."""
    unread = [name for name in recorded.unread() if name not in unused]
    return tuple(
        name
        for name in unread
        if not _is_harmless(name, _value(config, name)) and not _is_superseded(config, name, unread)
    )


def _value(config: Mapping[str, Any], dotted: str) -> Any:  # noqa: ANN401 # any JSON value
    """None where the field, or a section on the way, is missing."""
    name, _, rest = dotted.partition(".")
    value = config.get(name)
    if not rest:
        return value
    return _value(value, rest) if isinstance(value, Mapping) else None


def _is_harmless(dotted: str, value: object) -> bool:
    name = dotted.rpartition(".")[2]
    says_nothing = value is None or value in ([], {}, "")
    return says_nothing or _HARMLESS.fullmatch(name) is not None or _HARMLESS_VALUES.get(name, None) == value


def _is_superseded(config: Mapping[str, Any], dotted: str, unread: Sequence[str]) -> bool:
    """Where both have one name, they must agree."""
    section, dot, name = dotted.rpartition(".")
    other = f"{section}{dot}{_SUPERSEDED_BY.get(name, name)}"
    said = _value(config, other)
    agrees = not other.endswith(f".{name}") or said == _value(config, dotted)
    return other not in unread and said is not None and agrees
