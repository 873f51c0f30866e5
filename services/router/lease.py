"""One request's lease: extended while something is wanted under it, and given back."""

import asyncio

from services.common.errors import HypicError
from services.common.telemetry import get_logger
from services.router.background import Background
from services.router.domain.ports import Directory

__all__ = ["RequestLease"]


class RequestLease:
    """None until the first plan brings it (`lease_id` is empty then). seconds: how long it lasts without being extended."""

    def __init__(self, directory: Directory, background: Background, seconds: float, timeout_seconds: float) -> None:
        self._directory = directory
        self._background = background
        self._seconds = seconds
        self._timeout_seconds = timeout_seconds
        self._renewer: asyncio.TimerHandle | None = None
        self._is_held = False
        self.lease_id = ""

    def hold(self, lease_id: str) -> None:
        """A plan has answered with this lease: extend it until `let_go`."""
        self.lease_id = lease_id
        if self._renewer is None:
            self._renew_later()

    def let_go(self) -> None:
        """Nothing more is wanted under it; it may end by itself."""
        self._is_held = False
        if self._renewer:
            self._renewer.cancel()

    async def give_back(self) -> None:
        """Let go, and release it now.

        Raises:
            HypicError: the directory does not answer.
        """
        self.let_go()
        if self.lease_id:
            await self._directory.release(self.lease_id, self._timeout_seconds)

    def _renew_later(self) -> None:
        """By a timer: most requests are past their first token before it is due, and a task for each would cost them."""
        self._is_held = True
        self._renewer = asyncio.get_running_loop().call_later(self._seconds / 3, self._begin_renewal)

    def _begin_renewal(self) -> None:
        self._background.spawn(self._renew())

    async def _renew(self) -> None:
        try:
            await self._directory.renew(self.lease_id, self._seconds, self._timeout_seconds)
        except HypicError as error:
            # Of a lease that was given back meanwhile nothing is left to renew.
            if self._is_held:
                get_logger().warning("renew_failed", error=str(error))
        if self._is_held:
            self._renew_later()
