"""Keys and values of fresh tokens into page pools: keys are normed and turned on their way, where a layer does so."""

from services.worker.ops.page_store.types import FreshTokens, KeyForm, KeyNorm

__all__ = ["FreshTokens", "KeyForm", "KeyNorm"]
