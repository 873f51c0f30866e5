"""Rotary position embedding over the first channels of a head, half-split pairing (NeoX style) or interleaved (GPT-J style).

Source: Su et al., RoFormer (arXiv 2104.09864); partial rotation as in GPT-NeoX. Angles are computed in fp32 and each
vector is rotated once: rotating stored keys there and back would add error.
"""

import math
from dataclasses import dataclass

import torch

__all__ = ["Llama3Scaling", "Rotary"]


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequencies for a context that grew after training: slow ones divided by `factor`, fast ones kept, a ramp between.

    A frequency is slow where the trained context holds fewer than `low` of its turns, and fast where it holds more than
    `high`. Source: the `llama3` rope type of the Llama 3.1 release.
    """

    factor: float
    low: float
    high: float
    trained_context: int

    def scale(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Frequencies `[D_rot / 2]` in radians a token."""
        turns = self.trained_context * frequencies / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return kept * frequencies + (1.0 - kept) * frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Rotary:
    """Frequencies `[D_rot / 2]` in radians a token; a head's channels from `D_rot` on are left alone.

    label: names the frequencies, so that layers of equal ones share what they work out of them; interleaved: channels `2i`
    and `2i + 1` turn together, not `i` and `i + D_rot / 2`.
    """

    frequencies: torch.Tensor
    label: str
    interleaved: bool = False

    @classmethod
    def create(
        cls,
        theta: float,
        rotary_dim: int,
        device: torch.device,
        interleaved: bool = False,
        scaling: Llama3Scaling | None = None,
    ) -> "Rotary":
        """Frequencies `theta^(−2i / rotary_dim)`, scaled where the model's context grew after training."""
        exponents = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float32) / rotary_dim
        frequencies = 1.0 / theta**exponents
        label = f"{theta} {rotary_dim} {scaling}"
        return cls(frequencies if scaling is None else scaling.scale(frequencies), label, interleaved)

    @property
    def half(self) -> int:
        """`D_rot / 2`."""
        return len(self.frequencies)

    def rotate(self, heads: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Heads `[..., H, D]` rotated by integer places `[...]`; negative places turn back."""
        half = self.frequencies.shape[0]
        angles = places.to(self.frequencies.dtype)[..., None, None] * self.frequencies
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        turned, rest = heads[..., : 2 * half], heads[..., 2 * half :]
        if self.interleaved:
            first, second = turned.unflatten(-1, (half, 2)).unbind(-1)
            pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
            return torch.cat([pairs.flatten(-2), rest], dim=-1)
        first, second = turned[..., :half], turned[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def rotate_state(self, state: torch.Tensor, place: int) -> torch.Tensor:
        """A recurrent state `[H, K, V]` of rotated keys moved by `place` positions: its K rows turn as its keys would."""
        columns = state.permute(2, 0, 1)
        places = torch.full(columns.shape[:1], place, device=state.device)
        return self.rotate(columns, places).permute(1, 2, 0).contiguous()
