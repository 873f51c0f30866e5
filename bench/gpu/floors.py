"""What a pass has to read and to compute at least."""

from collections.abc import Iterable

from services.worker.mixers.shapes import PageShape
from services.worker.models.spec import ModelSpec

__all__ = ["attention_operations", "plane_bytes", "query_heads", "state_bytes"]


def query_heads(shape: object) -> int:
    """Of an attention layer.

    Raises:
        TypeError: the layer's shape does not say.
    """
    heads = getattr(shape, "num_heads", None)
    if not isinstance(heads, int):
        raise TypeError(f"{type(shape).__name__} does not say how many query heads there are")
    return heads


def attention_operations(spec: ModelSpec, positions: Iterable[int]) -> float:
    """Floating-point operations of queries at true positions over all keys at or before them, all attention layers."""
    pairs = sum(position + 1 for position in positions)
    channels = 0
    for layer in spec.layers:
        kept = layer.mixer.kept
        if isinstance(kept, PageShape):
            channels += query_heads(layer.mixer) * (kept.key_dim + kept.value_dim)
    return 2.0 * pairs * channels


def plane_bytes(spec: ModelSpec, itemsize: int) -> int:
    """A segment state's transitions, end states and tails, all linear layers."""
    return sum(state.plane_bytes(itemsize) for state in spec.states)


def state_bytes(spec: ModelSpec, itemsize: int) -> int:
    """A running request's recurrent states and tails, all linear layers."""
    return sum(state.state_bytes(itemsize) for state in spec.states)
