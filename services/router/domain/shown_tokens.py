"""The tokens of a reply with how likely they were, in step with the text that is shown."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from services.router.domain.ports import TokenLogprobs

__all__ = ["PendingTokens", "ShownToken"]


@dataclass(frozen=True, slots=True)
class ShownToken:
    """content: its bytes, maybe of a part of a character; logprob: of it; top: the likeliest tokens with theirs, best first;
    offset: characters of the reply before it.
    """

    content: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int


class PendingTokens:
    """Keeps tokens until their text is shown: none of those that make a stop string alone ever is."""

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        self._spell = spell
        self._pending: deque[ShownToken] = deque()

    def add(self, token_id: int, logprobs: TokenLogprobs, offset: int) -> None:
        """The next token, in front of which the reply has `offset` characters, shown or not."""
        top = tuple((self._spell(each), logprob) for each, logprob in logprobs.top)
        self._pending.append(ShownToken(self._spell(token_id), logprobs.own, top, offset))

    def take(self, num_shown: int) -> tuple[ShownToken, ...]:
        """Those that begin within the characters shown by now."""
        taken = []
        while self._pending and self._pending[0].offset < num_shown:
            taken.append(self._pending.popleft())
        return tuple(taken)

    def flush(self) -> tuple[ShownToken, ...]:
        """The rest."""
        rest = tuple(self._pending)
        self._pending.clear()
        return rest
