"""What the router knows about the model that a worker serves."""

from dataclasses import dataclass

from services.router.domain.errors import RouterError

__all__ = ["ModelInfo", "ModelRefusedError", "Profile"]


class ModelRefusedError(RouterError):
    """The model's template or tokenizer cannot keep client text apart from control tokens."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The part of a worker's profile that shapes prompts and decides what is worth reusing; lengths in tokens.

    Segments below min_segment_tokens are computed in place; prefixes below min_body are not looked up.
    """

    digest: str
    min_segment_tokens: int
    min_body: int
    document_open: str
    document_close: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A worker's description of itself. can_capture: the one that combines computes segment states too."""

    worker_id: str
    name: str
    revision: str
    profile: Profile
    chat_template: str
    context_length: int
    stop_token_ids: tuple[int, ...]
    bos_token: str
    eos_token: str
    can_capture: bool
