"""The model that the router speaks for, and where it comes from."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.router.domain.assembly import Assembler
from services.router.domain.calibration import Calibration
from services.router.domain.model import ModelInfo
from services.router.domain.parts import Prompt
from services.router.domain.request import ChatPrompt, PromptError, TextPrompt
from services.router.domain.text_ports import Detokenizer

__all__ = ["Models", "ServedModel"]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A worker's description with everything that was built and checked from it. `created` is a Unix time."""

    info: ModelInfo
    assembler: Assembler
    new_detokenizer: Callable[[], Detokenizer]
    created: int

    async def assemble(self, prompt: ChatPrompt | TextPrompt) -> Prompt:
        """What takes long leaves the event loop free; what does not is spared the change of threads, which takes longer.

        Raises:
            PromptError: see `Assembler`.
        """
        if self.assembler.is_quick(prompt):
            return self.assembler.assemble(prompt)
        return await asyncio.to_thread(self.assembler.assemble, prompt)

    def check_name(self, name: str) -> None:
        """Refuse another name than the model's.

        Raises:
            PromptError: it is not this model's.
        """
        if name != self.info.name:
            raise PromptError(
                f"the model {name!r} does not exist; this server has {self.info.name!r}",
                param="model",
                code="model_not_found",
            )


class Models(Protocol):
    """What the workers serve now."""

    def require(self) -> ServedModel:
        """The served model.

        Raises:
            UnavailableError: no worker is there; the message says why.
        """
        ...

    async def wait_back(self, seconds: float) -> ServedModel:
        """The served model, waiting this long for a worker that went away.

        Raises:
            UnavailableError: none came.
        """
        ...

    def calibration(self) -> Calibration:
        """What workers know of the loss under their profile."""
        ...
