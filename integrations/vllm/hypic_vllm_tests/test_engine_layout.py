"""Where planes go in the memory of vLLM's CPU build."""

import pytest
import torch
from hypic_vllm.layout import LayoutError, slots_of, state_block, write_linear


def test_slots_follow_the_blocks() -> None:
    assert slots_of([7, 3], 4, 6).tolist() == [28, 29, 30, 31, 12, 13]
    assert slots_of([7], 4, 4).tolist() == [28, 29, 30, 31]


@pytest.mark.parametrize(("blocks", "tokens"), [([7], 5), ([7, 3, 2], 8), ([7, 0], 6), ([], 1)])
def test_blocks_that_do_not_hold_the_tokens_are_refused(blocks: list[int], tokens: int) -> None:
    with pytest.raises(LayoutError):
        slots_of(blocks, 4, tokens)


@pytest.mark.parametrize(
    ("blocks", "block_size", "tokens", "block"),
    [
        ([5], 8192, 1454, 5),  # one block for the whole context
        ([0, 0, 9], 384, 900, 9),  # `align`: null blocks ahead of the one in which the tokens end
        ([0, 9], 384, 768, 9),  # the tokens fill it
        ([0, 0, 9], 384, 769, 9),
    ],
)
def test_a_request_goes_on_from_the_block_in_which_its_tokens_end(
    blocks: list[int], block_size: int, tokens: int, block: int
) -> None:
    assert state_block(blocks, block_size, tokens) == block


@pytest.mark.parametrize(("blocks", "tokens"), [([0, 9], 900), ([0, 0, 0], 900), ([0, 0, 9, 4], 900), ([], 1)])
def test_without_such_a_block_nothing_is_written(blocks: list[int], tokens: int) -> None:
    with pytest.raises(LayoutError):
        state_block(blocks, 384, tokens)


def _caches(heads: int = 2, key_dim: int = 3, value_dim: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    tails = torch.full((4, 3, 16), -1.0, dtype=torch.bfloat16)
    # As vLLM strides them: a page holds tail and state, and more behind them.
    pages = torch.full((4, 200), -1.0)
    states = pages.as_strided((4, heads, value_dim, key_dim), (200, value_dim * key_dim, key_dim, 1), 24)
    return tails, states


def test_a_state_lies_in_memory_as_heads_keys_values() -> None:
    """The declared shape has values ahead of keys; with keys and values of one length a mistake would not show."""
    tails, states = _caches()
    state = torch.arange(30.0).view(2, 3, 5)
    tail = torch.arange(48.0).view(3, 16).to(torch.bfloat16)
    write_linear((tails, states), 2, state, tail)
    assert states[2].reshape(-1).tolist() == state.reshape(-1).tolist()
    assert torch.equal(tails[2], tail)
    for other in (0, 1, 3):
        assert (states[other] == -1).all()
        assert (tails[other] == -1).all()


@pytest.mark.parametrize(
    ("state", "tail"),
    [
        (torch.zeros(2, 5, 3), torch.zeros(3, 16, dtype=torch.bfloat16)),
        (torch.zeros(1, 3, 5), torch.zeros(3, 16, dtype=torch.bfloat16)),
        (torch.zeros(2, 3, 5, dtype=torch.bfloat16), torch.zeros(3, 16, dtype=torch.bfloat16)),
        (torch.zeros(2, 3, 5), torch.zeros(3, 16)),
        (torch.zeros(2, 3, 5), torch.zeros(4, 16, dtype=torch.bfloat16)),
    ],
)
def test_other_shapes_and_dtypes_are_refused_and_nothing_is_written(state: torch.Tensor, tail: torch.Tensor) -> None:
    tails, states = _caches()
    with pytest.raises(LayoutError):
        write_linear((tails, states), 2, state, tail)
    assert (states == -1).all()
    assert (tails == -1).all()
