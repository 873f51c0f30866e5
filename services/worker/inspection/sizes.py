"""What a model takes: weights, what a token and a segment leave behind, what a running request holds."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.worker.inspection.requests import TensorRequest
from services.worker.mixers.share import WHOLE, Share
from services.worker.models.spec import ModelSpec

__all__ = ["Sizes", "StateBytes", "measure_sizes"]


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of a segment state outside the pages: transitions, end states and decays in fp32, tails in the model's dtype."""

    transitions: int
    end_states: int
    decays: int
    tails: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.transitions + self.end_states + self.decays + self.tails


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parameters in numbers, the rest in bytes.

    active_parameters: what a token passes through, neither experts that it is not sent to nor, beside a head of its own, the
    embedding, of which it takes a row; weights: as they stand in memory, norms and decays in
    fp32; token: keys and values, all attention layers; request_state: recurrent states and tails of one running request.
    """

    parameters: int
    active_parameters: int
    weights: int
    token: int
    segment: StateBytes
    request_state: int


def measure_sizes(spec: ModelSpec, requests: Mapping[str, TensorRequest], itemsize: int, share: Share = WHOLE) -> Sizes:
    """Sizes of a model whose values take `itemsize` bytes; the bytes are those of a share, for which `requests` were noted.

    Raises:
        SplitError: the model has no such share.
    """
    own = spec.split(share)
    parameters = sum(request.num_parameters for request in requests.values())
    blocks = [layer.feed_forward for layer in spec.layers]
    hidden = spec.hidden_size
    idle = sum(block.num_parameters(hidden) - block.num_active_parameters(hidden) for block in blocks)
    looked_up = 0 if spec.tied_head else spec.vocab_size * hidden
    return Sizes(
        parameters=parameters,
        active_parameters=parameters - idle - looked_up,
        weights=sum(request.num_bytes for request in requests.values()),
        token=own.token_bytes(itemsize),
        segment=_segment(own, itemsize),
        request_state=sum(state.state_bytes(itemsize) for state in own.states),
    )


def _segment(spec: ModelSpec, itemsize: int) -> StateBytes:
    transitions = end_states = decays = tails = 0
    for state in spec.states:
        heads, rows, columns = state.transition_shape
        transitions += 4 * heads * rows * columns
        end_states += 4 * heads * state.key_dim * state.value_dim
        decays += 4 * heads
        tails += itemsize * (state.conv_taps - 1) * state.conv_channels
    return StateBytes(transitions, end_states, decays, tails)
