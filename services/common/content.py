"""Hashes over token ids, computed the same way by router and worker."""

from array import array
from collections.abc import Sequence

from blake3 import blake3

__all__ = ["HASH_BYTES", "chain_hash", "content_hash"]

HASH_BYTES = 32


def content_hash(profile_digest: str, token_ids: Sequence[int]) -> bytes:
    """BLAKE3 of profile digest and token ids: names one segment state's content, independent of tenant and place."""
    digest = blake3(profile_digest.encode() + b"\0")
    digest.update(array("I", token_ids).tobytes())
    return digest.digest()


def chain_hash(previous: bytes, part_content: bytes, served: str) -> bytes:
    """One link of a prefix chain: what came before, this part's content, and how it was served.

    `served` is `exact`, or names the profile and the refreshed set of a composed part, so that a prefix with a
    composed link never answers for an exact one.
    """
    return blake3(previous + part_content + served.encode()).digest()
