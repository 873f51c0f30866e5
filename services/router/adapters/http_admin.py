"""The endpoints below `/admin`, for administrators alone."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from services.router.adapters.auth import Gate
from services.router.adapters.openapi import describe
from services.router.adapters.quality_view import quality_view
from services.router.domain.store import Eviction, StoreDirectory
from services.router.domain.tenancy import Scope
from services.router.guard import QualityGuard

__all__ = ["AdminSurface"]

_QUALITY = describe("What the guard over composed answers has seen", "Quality", errors=(401, 403, 500))
_EVICTIONS = describe("Which tenant evicts whom", "EvictionList", errors=(401, 403, 500, 503))


class AdminSurface:
    """What an administrator asks of the whole deployment."""

    def __init__(self, store: StoreDirectory, guard: QualityGuard, gate: Gate) -> None:
        self._store = store
        self._guard = guard
        self._gate = gate

    def routes(self) -> APIRouter:
        """All below `/admin`."""
        routes = APIRouter(prefix="/admin")
        routes.add_api_route("/evictions", self.evictions, methods=["GET"], **_EVICTIONS)
        routes.add_api_route("/quality", self.quality, methods=["GET"], **_QUALITY)
        return routes

    async def quality(self, request: Request) -> Response:
        """`GET /admin/quality`: how every tag is answered, and why."""
        self._gate.admit(request, Scope.ADMIN)
        return JSONResponse(quality_view(self._guard.report()))

    async def evictions(self, request: Request) -> Response:
        """`GET /admin/evictions`: whose states made room for whose."""
        self._gate.admit(request, Scope.ADMIN)
        return JSONResponse({"object": "list", "data": [_row(each) for each in await self._store.evictions()]})


def _row(eviction: Eviction) -> dict[str, object]:
    return {
        "object": "eviction",
        "evictor": eviction.evictor,
        "victim": eviction.victim,
        "entries": eviction.num_entries,
        "bytes": eviction.size_bytes,
        "tokens": eviction.num_tokens,
    }
