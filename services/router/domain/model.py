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
    """What all workers of a model say of it. state_bytes, state_token_bytes: what a segment state weighs, of itself and for
    every token; num_layers: in how many pieces it travels while it is computed; vocab_size: token ids
    lie below it.
    """

    name: str
    revision: str
    profile: Profile
    chat_template: str
    context_length: int
    stop_token_ids: tuple[int, ...]
    bos_token: str
    eos_token: str
    state_bytes: int = 0
    state_token_bytes: int = 0
    num_layers: int = 1
    vocab_size: int = 0
