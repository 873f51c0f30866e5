"""Attention over latents, of which every head makes a key and a value of its own: absorbed into queries, or expanded."""

from services.worker.ops.latent_attention.types import Expansion

__all__ = ["Expansion"]
