"""Where a decode state's planes lie in the memory of vLLM's CPU build. Tensors, without vLLM."""

from collections.abc import Sequence

import torch

__all__ = ["LayoutError", "slots_of", "state_block", "write_linear"]


class LayoutError(ValueError):
    """The state and the engine's memory do not fit; the message names the plane."""


def slots_of(block_ids: Sequence[int], block_size: int, num_tokens: int) -> torch.Tensor:
    """The flat slots `[N]`, int64, of a request's first tokens in an attention group's blocks.

    Raises:
        LayoutError: the blocks do not hold exactly these tokens.
    """
    if len(block_ids) != -(-num_tokens // block_size) or 0 in block_ids:
        raise LayoutError(
            f"{len(block_ids)} blocks of {block_size} for {num_tokens} tokens, or an empty one among them"
        )
    places = torch.arange(num_tokens)
    return torch.tensor(block_ids, dtype=torch.int64)[places // block_size] * block_size + places % block_size


def state_block(block_ids: Sequence[int], block_size: int, num_tokens: int) -> int:
    """The block of a recurrent group from which a request goes on behind its first tokens.

    With `mamba_cache_mode` `align` every block stands for `block_size` tokens, and all ahead of the one in which the tokens
    end are the null block, 0; with `none` there is one block, as long as the context.

    Raises:
        LayoutError: there is no such block.
    """
    index = (num_tokens - 1) // block_size
    if len(block_ids) != index + 1 or block_ids[index] == 0:
        raise LayoutError(f"{len(block_ids)} recurrent blocks of {block_size} for {num_tokens} tokens")
    return block_ids[index]


def write_linear(caches: Sequence[torch.Tensor], block: int, state: torch.Tensor, tail: torch.Tensor) -> None:
    """A linear layer's state `[H, K, V]` and tail `[taps − 1, C]` into a block of `caches`: tails, then states.

    The CPU build declares its states `[blocks, H, V, K]` and reads their memory as `[blocks, H, K, V]`.

    Raises:
        LayoutError: shapes or dtypes differ.
    """
    tails, states = caches
    heads, key_dim, value_dim = state.shape
    if states.shape[1:] != (heads, value_dim, key_dim) or states.dtype != state.dtype:
        raise LayoutError(f"state is {tuple(state.shape)} of {state.dtype}, the engine keeps {tuple(states.shape[1:])}")
    if tails.shape[1:] != tail.shape or tails.dtype != tail.dtype:
        raise LayoutError(f"tail is {tuple(tail.shape)} of {tail.dtype}, the engine keeps {tuple(tails.shape[1:])}")
    states[block].view(heads, key_dim, value_dim).copy_(state)
    tails[block].copy_(tail)
