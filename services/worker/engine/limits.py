"""What a worker accepts."""

from dataclasses import dataclass

__all__ = ["EngineLimits"]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of the engine's work.

    context_length: prompt and generated tokens of one request; max_waiting: requests that wait for room; max_running:
    requests that combine or decode at once; layer_tokens: tokens times layers that passes advance between two decode
    steps; capture_tokens: segments are packed into one capture pass up to this many tokens; sweep_tokens:
    waiting prompts share one sweep over the layers up to this many live tokens, and captures what room they leave in it.
    """

    context_length: int
    max_waiting: int = 64
    max_running: int = 16
    layer_tokens: int = 1024
    capture_tokens: int = 1024
    sweep_tokens: int = 2048
