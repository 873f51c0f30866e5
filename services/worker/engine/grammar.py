"""What a reply is held to, as the engine sees it: which tokens may come next."""

from typing import Protocol

import torch

__all__ = ["TokenGrammar"]


class TokenGrammar(Protocol):
    """The grammar of one reply, with how far the reply has come. Of the engine's thread alone."""

    def allowed(self) -> torch.Tensor:
        """Which tokens may come next, bool `[vocabulary]` on the CPU; where nothing may, the model's stop tokens.

        Raises:
            ValueError: the grammar cannot be followed any further.
        """
        ...

    def accept(self, token: int) -> None:
        """One of those that `allowed` gave last has come. Does not wait for what may come then."""
        ...
