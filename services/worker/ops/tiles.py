"""Sizes of tiles that kernels share."""

__all__ = ["block"]


def block(channels: int) -> int:
    """The smallest tile of a matrix product that holds all channels."""
    return max(16, 1 << (channels - 1).bit_length())
