"""Encodings: how far each is off, that it gives back what it wrote, and which heads keep a transition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.blob.encodings import EXACT, Precision, StateEncoding, decode, decode_tail, encode, encode_tail
from services.blob.tensors import plane_of, tensor_of

H, K, V = 6, 8, 5
DECAY = torch.tensor([0.0, 1e-6, 0.01, 0.3, 0.7, 0.99])
PRECISIONS = list(Precision)


def _draw(seed: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    transition = torch.randn(H, K, K, generator=generator) * DECAY[:, None, None]
    return transition * scale, torch.randn(H, K, V, generator=generator) * scale


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((actual - expected).norm() / expected.norm()).item())


def test_exact_is_exact() -> None:
    transition, end_state = _draw(0)
    planes = encode(transition, end_state, DECAY, EXACT)
    assert EXACT.is_exact
    again = decode(planes, EXACT)
    assert torch.equal(again[0], transition)
    assert torch.equal(again[1], end_state)


@pytest.mark.parametrize(
    ("precision", "least", "most"),
    [(Precision.BFLOAT16, 5e-4, 4e-3), (Precision.FLOAT8, 1e-2, 4e-2), (Precision.INT8, 1e-3, 1.2e-2)],
)
def test_relative_errors(precision: Precision, least: float, most: float) -> None:
    """Of the order of the precision's last bit: neither better (nothing would be encoded) nor worse (a wrong scale)."""
    transition, end_state = _draw(1)
    encoding = StateEncoding(precision, precision, precision)
    for actual, expected in zip(
        decode(encode(transition, end_state, DECAY, encoding), encoding), (transition, end_state), strict=True
    ):
        assert least < _error(actual, expected) < most
    assert not encoding.is_exact


@given(
    seed=st.integers(0, 1000),
    power=st.integers(-60, 60),
    precisions=st.tuples(*[st.sampled_from(PRECISIONS)] * 3),
    near=st.sampled_from([0.0, 1e-9, 1e-7, 1e-5, 1e-3, 1.0]),
    bounds=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
)
@settings(deadline=None, max_examples=300)
def test_what_is_decoded_encodes_to_itself(
    seed: int, power: int, near: float, precisions: tuple[Precision, Precision, Precision], bounds: list[float]
) -> None:
    """Moved any number of times through planes, a state stays what it is, however near its transitions are to `γ I`."""
    encoding = StateEncoding(*precisions, slow_decay=bounds[1], negligible_decay=bounds[0])
    transition, end_state = _draw(seed, 2.0**power)
    if near:
        transition = near * _draw(seed)[0] + DECAY[:, None, None] * torch.eye(K)
    once = decode(encode(transition, end_state, DECAY, encoding), encoding)
    planes = encode(*once, DECAY, encoding)
    moved = {name: tensor_of(plane_of(0, name, tensor)) for name, tensor in planes.items()}
    for first, second in zip(once, decode(moved, StateEncoding.from_fields(encoding.fields)), strict=True):
        assert torch.equal(first, second)


def test_a_transition_near_a_multiple_of_identity_is_written_as_the_difference() -> None:
    """Eight bits then say it as well as its own difference in eight bits is said, not as the whole would be."""
    generator = torch.Generator().manual_seed(5)
    difference = 0.01 * torch.randn(H, K, K, generator=generator) * DECAY[:, None, None]
    transition = DECAY[:, None, None] * torch.eye(K) + difference
    end_state = torch.zeros(H, K, V)
    for precision, most in ((Precision.FLOAT8, 8e-4), (Precision.INT8, 4e-4)):
        encoding = StateEncoding(precision, precision, precision)
        again, _ = decode(encode(transition, end_state, DECAY, encoding), encoding)
        assert _error(again, transition) < most
        # The negative control: a head of another decay has another difference.
        wrong, _ = decode(encode(transition, end_state, DECAY.flip(0), encoding), encoding)
        assert _error(wrong, transition) > 10 * most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("channels", [0, 96, 256, 1027])
def test_tails(dtype: torch.dtype, precision: Precision, channels: int) -> None:
    """In the model's dtype again, never wider than it, and the same however often they move."""
    generator = torch.Generator().manual_seed(6)
    tail = (torch.randn(3, channels, generator=generator) * torch.tensor([[1.0], [100.0], [0.01]])).to(dtype)
    encoding = StateEncoding(conv_tail=precision)
    planes = encode_tail(tail, encoding)
    assert planes["conv_tail"].nbytes <= tail.nbytes
    once = decode_tail(planes, encoding, dtype)
    assert (once.shape, once.dtype) == (tail.shape, dtype)
    assert torch.equal(decode_tail(encode_tail(once, encoding), encoding, dtype), once)
    if channels:
        bound = {Precision.FLOAT8: 4e-2, Precision.INT8: 2e-2, Precision.BFLOAT16: 4e-3}.get(precision, 0.0)
        for own, expected in zip(once.float(), tail.float(), strict=True):
            assert _error(own, expected) <= bound
        assert encoding.is_exact == torch.equal(once, tail) or precision is Precision.BFLOAT16


def test_rows_have_scales_of_their_own() -> None:
    """A row a million times smaller than its neighbour keeps its relative precision."""
    _, end_state = _draw(2)
    end_state[:, 0] *= 1e-6
    encoding = StateEncoding(end_state=Precision.FLOAT8)
    _, again = decode(encode(torch.zeros(H, K, K), end_state, DECAY, encoding), encoding)
    assert _error(again[:, 0], end_state[:, 0]) < 4e-2


@pytest.mark.parametrize("precision", PRECISIONS)
def test_zero_rows_and_no_heads(precision: Precision) -> None:
    encoding = StateEncoding(precision, precision, precision, slow_decay=1.0, negligible_decay=1.0)
    planes = encode(torch.zeros(H, K, K), torch.zeros(H, K, V), DECAY, encoding)
    assert planes["slow_transition"].shape == (0, K, K)
    transition, end_state = decode(planes, encoding)
    assert not transition.any()
    assert not end_state.any()


def test_which_heads_keep_a_transition() -> None:
    transition, end_state = _draw(3)
    encoding = StateEncoding(Precision.FLOAT32, Precision.FLOAT8, Precision.FLOAT32, 0.7, 1e-4)
    planes = encode(transition, end_state, DECAY, encoding)
    # 0.7 in fp32 lies below 0.7 in fp64.
    assert planes["transition"].shape[0] == 3
    assert planes["slow_transition"].shape[0] == 1
    again, _ = decode(planes, encoding)
    assert not again[:2].any()
    assert torch.equal(again[5], transition[5])


@pytest.mark.parametrize("shape", [(H, K, 1), (H, 1, 1)])
def test_small_transitions_stay_as_they_are(shape: tuple[int, ...]) -> None:
    transition = torch.rand(shape)
    encoding = StateEncoding(Precision.FLOAT8, Precision.FLOAT8, Precision.FLOAT8, negligible_decay=0.5)
    again, _ = decode(encode(transition, _draw(4)[1], DECAY, encoding), encoding)
    assert torch.equal(again, transition)


def test_bounds_out_of_order() -> None:
    with pytest.raises(ValueError, match="negligible_decay"):
        StateEncoding(slow_decay=0.1, negligible_decay=0.2)
