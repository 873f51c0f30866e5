"""The tensors of a checkpoint's files against those that the family asks for; only the files' headers are read."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from services.worker.inspection.requests import TensorRequest
from services.worker.models.checkpoint import TensorHeader
from services.worker.models.quantisation import SCALE_SUFFIX, BlockScales

__all__ = ["ShapeFault", "WeightsReport", "compare_weights"]

# Vision towers, prediction heads of several tokens, and what older releases stored although it follows from the config.
_IGNORED = re.compile(
    r"(model\.)?(visual|vision_tower|mtp)\.|.*\.rotary_emb\.inv_freq$"
    r"|.*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$"
)
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")
_FP8 = "F8_E4M3"
_PLAIN = frozenset({"BF16", "F16", "F32", "F64"})
_TIED_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ShapeFault:
    """A tensor whose shape is not what the config implies."""

    name: str
    found: tuple[int, ...]
    implied: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What stands in the files.

    dtypes: tensors by dtype as safetensors spells it; missing: asked for and not there; unreadable: of a dtype that is not
    read; unexpected: there, not asked for, and not known to be left out; num_ignored: left out on purpose (vision tower,
    prediction heads, a tied head).
    """

    num_tensors: int
    dtypes: Mapping[str, int]
    missing: tuple[str, ...]
    wrong_shape: tuple[ShapeFault, ...]
    unreadable: tuple[str, ...]
    unexpected: tuple[str, ...]
    num_ignored: int

    @property
    def is_servable(self) -> bool:
        """Whether a worker would find everything that it reads."""
        return not (self.missing or self.wrong_shape or self.unreadable)


def compare_weights(
    requests: Mapping[str, TensorRequest],
    headers: Mapping[str, TensorHeader],
    num_layers: int,
    blocks: BlockScales | None = None,
) -> WeightsReport:
    """Every difference by name; weights in fp8 ask for the scales of their blocks too."""
    wanted = {name: request.shape for name, request in requests.items()}
    quantised: set[str] = set()
    if blocks is not None:
        matrices = [name for name, shape in wanted.items() if name in headers and len(shape) > 1]
        quantised = {name for name in matrices if headers[name].dtype == _FP8}
        wanted.update({name + SCALE_SUFFIX: blocks.shape(wanted[name]) for name in matrices if name in quantised})
    left_over = [name for name in headers if name not in wanted]
    unexpected = [name for name in left_over if not _is_ignored(name, num_layers)]
    faults = [
        ShapeFault(name, headers[name].shape, shape)
        for name, shape in wanted.items()
        if name in headers and headers[name].shape != shape
    ]
    return WeightsReport(
        num_tensors=len(headers),
        dtypes=dict(Counter(header.dtype for header in headers.values()).most_common()),
        missing=tuple(name for name in wanted if name not in headers),
        wrong_shape=tuple(faults),
        unreadable=tuple(
            f"{name} ({headers[name].dtype})"
            for name in wanted
            if name in headers and name not in quantised and headers[name].dtype not in _PLAIN
        ),
        unexpected=tuple(unexpected),
        num_ignored=len(left_over) - len(unexpected),
    )


def _is_ignored(name: str, num_layers: int) -> bool:
    """Some families store their prediction heads as layers behind the last one."""
    layer = _LAYER.match(name)
    is_behind = layer is not None and int(layer[1]) >= num_layers
    return is_behind or name == _TIED_HEAD or _IGNORED.match(name) is not None
