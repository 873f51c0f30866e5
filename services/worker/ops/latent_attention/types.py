"""What heads make of a latent."""

from dataclasses import dataclass

import torch

__all__ = ["Expansion"]


@dataclass(frozen=True, slots=True)
class Expansion:
    """key_up `[H, P, C]`: a head's key of P channels from a latent of C; value_up `[H, C, V]`: its value of V channels.

    Queries are `[N, H, R + P]`, their positional channels first, as those of the stored keys `[positional | latent]` are.
    """

    key_up: torch.Tensor
    value_up: torch.Tensor

    @property
    def latent_dim(self) -> int:
        """C."""
        return self.key_up.shape[2]

    @property
    def plain_dim(self) -> int:
        """P."""
        return self.key_up.shape[1]

    @property
    def value_dim(self) -> int:
        """V."""
        return self.value_up.shape[2]

    def absorb(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries of stored keys `[N, H, R + C]`: `q · (W c) = (Wᵀ q) · c`."""
        positional, plain = queries.tensor_split([-self.plain_dim], dim=-1)
        return torch.cat([positional, _each_head(plain, self.key_up)], dim=-1)

    def expand(self, mixed: torch.Tensor) -> torch.Tensor:
        """Weighted latents `[N, H, C]` to weighted values `[N, H, V]`."""
        return _each_head(mixed, self.value_up)

    def of_heads(self, heads: slice) -> "Expansion":
        """Some heads alone."""
        return Expansion(self.key_up[heads], self.value_up[heads])


def _each_head(vectors: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """`[N, H, A]` through one matrix `[H, A, B]` a head: `[N, H, B]`."""
    return torch.bmm(vectors.transpose(0, 1), matrices).transpose(0, 1)
