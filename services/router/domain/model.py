"""What the router knows about the model that a worker serves."""

from dataclasses import dataclass

from services.router.domain.errors import RouterError

__all__ = ["CONV_HISTORY_TOKENS", "ModelInfo", "ModelRefusedError", "Profile"]

# A body shorter than the history of the short convolution (K − 1 inputs) has no tail of its own to compose.
CONV_HISTORY_TOKENS = 3


class ModelRefusedError(RouterError):
    """The model's template or tokenizer cannot keep client text apart from control tokens."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The part of `profile.toml` that shapes prompts and decides what is worth reusing; lengths in tokens."""

    digest: str
    seam_window: int
    min_body: int
    document_open: str
    document_close: str

    @property
    def min_segment_tokens(self) -> int:
        """Segments below this many tokens are computed in place."""
        return self.seam_window + max(CONV_HISTORY_TOKENS, self.min_body)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A worker's description of itself."""

    worker_id: str
    name: str
    revision: str
    profile: Profile
    chat_template: str
    context_length: int
    stop_token_ids: tuple[int, ...]
    bos_token: str
    eos_token: str
