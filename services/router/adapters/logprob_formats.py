"""Log probabilities as OpenAI's two endpoints write them."""

from collections.abc import Sequence
from typing import Any

from services.router.domain.shown_tokens import ShownToken

__all__ = ["chat_logprobs", "completion_logprobs"]

Json = dict[str, Any]


def chat_logprobs(tokens: Sequence[ShownToken]) -> Json:
    """`choices[].logprobs` of a chat: `token` shows bytes that are no characters by U+FFFD, `bytes` has them."""
    content = [
        _chat_token(each.content, each.logprob) | {"top_logprobs": [_chat_token(*one) for one in each.top]}
        for each in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ShownToken]) -> Json:
    """`choices[].logprobs` of a completion: the likeliest tokens and the drawn one by their text; offsets in the reply's text."""
    return {
        "tokens": [_completion_token(each.content) for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [
            {_completion_token(content): logprob for content, logprob in (*each.top, (each.content, each.logprob))}
            for each in tokens
        ],
        "text_offset": [each.offset for each in tokens],
    }


def _chat_token(content: bytes, logprob: float) -> Json:
    return {"token": content.decode(errors="replace"), "logprob": logprob, "bytes": list(content)}


def _completion_token(content: bytes) -> str:
    """Bytes that are no characters are written as OpenAI does, so that no two tokens are one key."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
