"""How transitions, end states and convolution tails are written: full, half, or eight bits with a scale a row; or not at all.

A transition's norm is at most its head's decay over the body, `γ` (design §3): heads below `negligible_decay` keep none,
heads from `slow_decay` on, whose memory of what precedes the segment lasts, keep theirs in a precision of their own.
In eight bits a transition is written as its difference from `γ I`, which is a quarter of it where a head remembers, so that
the scale is finer by as much. Scales are powers of two, so that decoded values encode to themselves: a state stays what it
is however often it moves.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import gcd

import torch

__all__ = ["EXACT", "Precision", "StateEncoding", "decode", "decode_tail", "encode", "encode_tail"]

# The largest number of e4m3, and what an eighth bit for the sign leaves of an integer; a little above both, where values
# are still rounded to them, since adding `γ I` and taking it away again leaves the last bits of fp32 uncertain.
_LARGEST = {torch.float8_e4m3fn: 450.0, torch.int8: 127.25}
# Finer than this part of `γ` a difference from `γ I` is not told apart from those bits.
_LEAST_DIFFERENCE = 2.0**-13
_LEAST_EXPONENT, _LARGEST_EXPONENT = -100, 100
# Channels of a tail that share a scale.
_TAIL_CHANNELS = 128


class Precision(StrEnum):
    """float8 is e4m3, int8 an integer; both have a power of two as scale a row."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8"
    INT8 = "int8"


_PLAIN = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}
_SCALED = {Precision.FLOAT8: torch.float8_e4m3fn, Precision.INT8: torch.int8}


@dataclass(frozen=True, slots=True)
class StateEncoding:
    """end_state: of `S`; transition, slow_transition: of dense transitions of heads whose `γ` lies below and from slow_decay on.

    Heads whose `γ` lies below negligible_decay keep no transition. Transitions of one number a head or channel stay in fp32.
    conv_tail: of convolution tails, whose dtype is the model's: what that holds anyway is not widened.

    Raises:
        ValueError: a field is unknown or out of range.
    """

    end_state: Precision = Precision.FLOAT32
    transition: Precision = Precision.FLOAT32
    slow_transition: Precision = Precision.FLOAT32
    slow_decay: float = 0.5
    negligible_decay: float = 0.0
    conv_tail: Precision = Precision.FLOAT32

    def __post_init__(self) -> None:
        if not 0.0 <= self.negligible_decay <= self.slow_decay <= 1.0:
            raise ValueError(
                f"negligible_decay, {self.negligible_decay}, and slow_decay, {self.slow_decay}, must lie between 0.0 and"
                " 1.0 in this order"
            )

    @classmethod
    def from_fields(cls, fields: Mapping[str, str | float]) -> "StateEncoding":
        """What `fields` wrote, from a blob's header."""
        return cls(
            Precision(str(fields["end_state"])),
            Precision(str(fields["transition"])),
            Precision(str(fields["slow_transition"])),
            float(fields["slow_decay"]),
            float(fields["negligible_decay"]),
            Precision(str(fields["conv_tail"])),
        )

    @property
    def fields(self) -> dict[str, str | float]:
        """Every field by its name, as JSON holds it."""
        return {name: str(value) if isinstance(value, Precision) else value for name, value in asdict(self).items()}

    @property
    def is_exact(self) -> bool:
        """Decoding gives the very values that were encoded."""
        precisions = (self.end_state, self.transition, self.slow_transition, self.conv_tail)
        return self.negligible_decay == 0.0 and all(one is Precision.FLOAT32 for one in precisions)


EXACT = StateEncoding()


def encode(
    transition: torch.Tensor, end_state: torch.Tensor, decay: torch.Tensor, encoding: StateEncoding
) -> dict[str, torch.Tensor]:
    """The planes of one linear layer's transition and end state, by name.

    transition: `[H, K, K]`, `[H, K, 1]` or `[H, 1, 1]`; end_state: `[H, K, V]`; decay: `[H]`, `γ` of the body; all fp32.
    """
    planes = _encode_values("end_state", end_state, encoding.end_state)
    planes["decay"] = decay
    if not _is_dense(transition.shape):
        return planes | {"transition": transition}
    fast, slow = _split(decay, encoding)
    return (
        planes
        | _encode_transitions("transition", transition[fast], decay[fast], encoding.transition)
        | _encode_transitions("slow_transition", transition[slow], decay[slow], encoding.slow_transition)
    )


def decode(planes: Mapping[str, torch.Tensor], encoding: StateEncoding) -> tuple[torch.Tensor, torch.Tensor]:
    """Transition and end state in fp32 from what `encode` made."""
    end_state = _decode_values("end_state", planes, encoding.end_state)
    if "slow_transition" not in planes:
        return planes["transition"], end_state
    decay = planes["decay"]
    fast, slow = _split(decay, encoding)
    heads, keys = end_state.shape[:2]
    transition = end_state.new_zeros(heads, keys, keys)
    transition[fast] = _decode_transitions("transition", planes, decay[fast], encoding.transition)
    transition[slow] = _decode_transitions("slow_transition", planes, decay[slow], encoding.slow_transition)
    return transition, end_state


def encode_tail(tail: torch.Tensor, encoding: StateEncoding) -> dict[str, torch.Tensor]:
    """The planes of one linear layer's convolution tail `[taps − 1, C]`, by name."""
    if encoding.conv_tail in _PLAIN:
        narrow = _PLAIN[encoding.conv_tail]
        return {"conv_tail": tail.to(narrow) if narrow.itemsize < tail.dtype.itemsize else tail}
    return _encode_values("conv_tail", _grouped(tail.float()), encoding.conv_tail)


def decode_tail(planes: Mapping[str, torch.Tensor], encoding: StateEncoding, dtype: torch.dtype) -> torch.Tensor:
    """The tail in the model's dtype from what `encode_tail` made."""
    if encoding.conv_tail in _PLAIN:
        return planes["conv_tail"].to(dtype)
    return _decode_values("conv_tail", planes, encoding.conv_tail).flatten(1).to(dtype)


def _grouped(tail: torch.Tensor) -> torch.Tensor:
    """`[taps − 1, C / group, group]`."""
    taps, channels = tail.shape
    group = gcd(channels, _TAIL_CHANNELS)
    return tail.reshape(taps, channels // group, group)


def _is_dense(shape: torch.Size) -> bool:
    return shape[-1] > 1


def _split(decay: torch.Tensor, encoding: StateEncoding) -> tuple[torch.Tensor, torch.Tensor]:
    """Which heads keep a transition below `slow_decay`, and from it on; compared in fp64, which both sides are exact in."""
    bound = decay.double()
    slow = bound >= encoding.slow_decay
    return (bound >= encoding.negligible_decay) & ~slow, slow


def _encode_transitions(
    name: str, transition: torch.Tensor, decay: torch.Tensor, precision: Precision
) -> dict[str, torch.Tensor]:
    if precision in _PLAIN:
        return _encode_values(name, transition, precision)
    least = _LEAST_DIFFERENCE * decay[:, None]
    return _encode_values(name, transition - _scaled_identities(transition, decay), precision, least)


def _decode_transitions(
    name: str, planes: Mapping[str, torch.Tensor], decay: torch.Tensor, precision: Precision
) -> torch.Tensor:
    values = _decode_values(name, planes, precision)
    return values if precision in _PLAIN else values + _scaled_identities(values, decay)


def _scaled_identities(transition: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """`γ I` for each head, `[H, K, K]`."""
    return decay[:, None, None] * torch.eye(transition.shape[-1], device=transition.device)


def _encode_values(
    name: str, values: torch.Tensor, precision: Precision, least: torch.Tensor | float = 0.0
) -> dict[str, torch.Tensor]:
    """`least`: for each row, values that need not be told apart from zero."""
    if precision in _PLAIN:
        return {name: values.to(_PLAIN[precision])}
    dtype = _SCALED[precision]
    exponents = _row_exponents(values.abs().amax(-1).clamp_min(least), _LARGEST[dtype])
    scaled = values * _powers(-exponents)[..., None]
    if dtype is torch.int8:
        scaled = scaled.round()
    return {name: scaled.to(dtype), f"{name}_exponents": exponents.to(torch.int8)}


def _decode_values(name: str, planes: Mapping[str, torch.Tensor], precision: Precision) -> torch.Tensor:
    values = planes[name].float()
    if precision in _PLAIN:
        return values
    return values * _powers(planes[f"{name}_exponents"])[..., None]


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """Two to each exponent, exactly, which `torch.pow` does not promise: the exponent's bits of an fp32 number."""
    return ((exponents.int() + 127) << 23).view(torch.float32)


def _row_exponents(largest_values: torch.Tensor, largest: float) -> torch.Tensor:
    """The least power of two a row by which its values must be divided to lie within ±`largest`."""
    mantissa, exponent = torch.frexp(largest_values / largest)
    # frexp gives [0.5, 1): an exact power of two needs no bit more.
    found = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return found.clamp(_LEAST_EXPONENT, _LARGEST_EXPONENT)
