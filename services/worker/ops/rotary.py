"""Rotary position embedding over the first channels of a head, half-split pairing (NeoX style).

Source: Su et al., RoFormer (arXiv 2104.09864); partial rotation as in GPT-NeoX. Angles are computed in fp32 and each
vector is rotated once: rotating stored keys there and back would add error.
"""

from dataclasses import dataclass

import torch

__all__ = ["Rotary"]


@dataclass(frozen=True, slots=True)
class Rotary:
    """Frequencies `[D_rot / 2]` in radians a token; a head's channels from `D_rot` on are left alone."""

    frequencies: torch.Tensor

    @classmethod
    def create(cls, theta: float, rotary_dim: int, device: torch.device) -> "Rotary":
        """Frequencies `theta^(−2i / rotary_dim)`."""
        exponents = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float32) / rotary_dim
        return cls(1.0 / theta**exponents)

    def rotate(self, heads: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Heads `[..., H, D]` rotated by integer places `[...]`; negative places turn back."""
        half = self.frequencies.shape[0]
        angles = places.to(self.frequencies.dtype)[..., None, None] * self.frequencies
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
