"""The endpoints of pins, for administrators."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from services.router.adapters.auth import Gate
from services.router.adapters.body import read_json
from services.router.adapters.fields import read
from services.router.adapters.library_schema import PinBody
from services.router.adapters.openapi import describe
from services.router.domain.pins import PinInfo
from services.router.domain.request import Namespace, PromptError
from services.router.domain.tenancy import Caller, Scope
from services.router.library import Library

__all__ = ["PinSurface"]

_ERRORS = (400, 401, 403, 404, 409, 500, 503)
_PIN = describe(
    "Keep a document's states", "Pin", body="PinBody", errors=(*_ERRORS, 413), example={"document": "plepi"}
)
_UNPIN = describe(
    "Let a document's states go",
    "Pin",
    errors=_ERRORS,
    query=[
        {
            "name": name,
            "in": "query",
            "description": text,
            "schema": {"type": "string", "minLength": 1, "maxLength": most},
        }
        for name, text, most in (
            ("document", "The document's id; without it, the whole tenant.", 512),
            ("tenant", "Whose; the caller's by default, where a document is named.", 256),
        )
    ],
)


class PinSurface:
    """Pins over HTTP: a document's, or a whole tenant's."""

    def __init__(self, library: Library, gate: Gate, max_body_bytes: int) -> None:
        self._library = library
        self._gate = gate
        self._max_body_bytes = max_body_bytes

    def routes(self) -> APIRouter:
        """Apart from documents, whose ids may hold slashes and any word behind them."""
        routes = APIRouter()
        routes.add_api_route("/v1/pins", self.pin, methods=["POST"], **_PIN)
        routes.add_api_route("/v1/pins", self.unpin, methods=["DELETE"], **_UNPIN)
        return routes

    async def pin(self, request: Request) -> Response:
        """`POST /v1/pins`."""
        caller = self._gate.admit(request, Scope.ADMIN)
        body = read(PinBody, await read_json(request, self._max_body_bytes), "")
        namespace = self._namespace(caller, body)
        info = await self._library.pin(namespace, body.document or "")
        return JSONResponse(_answer(namespace, body, info) | {"pinned": True})

    async def unpin(self, request: Request) -> Response:
        """`DELETE /v1/pins?document=…&tenant=…`."""
        caller = self._gate.admit(request, Scope.ADMIN)
        body = read(PinBody, dict(request.query_params), "")
        namespace = self._namespace(caller, body)
        info = await self._library.unpin(namespace, body.document or "")
        return JSONResponse(_answer(namespace, body, info) | {"pinned": False})

    def _namespace(self, caller: Caller, body: PinBody) -> Namespace:
        """A document without a tenant is the caller's own; a tenant is pinned as a whole only by its name."""
        if body.document is None and body.tenant is None:
            raise PromptError(
                "document, tenant or both must be given; a tenant alone means all of its documents",
                param="document",
                code="missing_required_parameter",
            )
        tenant = body.tenant or caller.tenant
        return Namespace(tenant, budget_bytes=self._gate.quotas_of(tenant).max_state_bytes)


def _answer(namespace: Namespace, body: PinBody, info: PinInfo) -> dict[str, object]:
    return {
        "object": "pin",
        "tenant": namespace.tenant,
        "document": body.document,
        "entries": info.num_entries,
        "promised_bytes": info.promised_bytes,
        "limit_bytes": info.limit_bytes,
    }
