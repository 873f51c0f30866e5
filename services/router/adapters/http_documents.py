"""The endpoints of documents: register, describe, list, delete, invalidate."""

from dataclasses import replace

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from services.router.adapters.auth import Gate, require
from services.router.adapters.body import read_json
from services.router.adapters.fields import read
from services.router.adapters.library_schema import DocumentBody, InvalidateBody
from services.router.adapters.openapi import describe
from services.router.adapters.schema import TextPart
from services.router.domain.lifecycle import DocumentDraft, DocumentInfo, Removal, ScopeKind, StateInfo
from services.router.domain.request import Document, Namespace, PromptError
from services.router.domain.tenancy import PUBLIC_TENANT, Caller, Scope
from services.router.library import Library

__all__ = ["DocumentSurface"]

_DEFAULT_PAGE = 20
_MAX_PAGE = 100

_ERRORS = (400, 401, 403, 500, 503)
_NAMESPACE = {
    "name": "namespace",
    "in": "query",
    "description": "`public` for what serves every tenant; administrators only.",
    "schema": {"type": "string", "enum": [PUBLIC_TENANT]},
}
_AFTER = {
    "name": "after",
    "in": "query",
    "description": "The id behind which the page begins.",
    "schema": {"type": "string"},
}
_PAGE = {
    "name": "limit",
    "in": "query",
    "description": "Documents of the page at most.",
    "schema": {"type": "integer", "minimum": 1, "maximum": _MAX_PAGE, "default": _DEFAULT_PAGE},
}
_REGISTER = describe(
    "Register a document and capture its state",
    "RegisteredDocument",
    body="DocumentBody",
    errors=(*_ERRORS, 413),
    example={"id": "plepi", "title": "Plepi", "text": "Plepi is a port on the northern coast.", "tags": ["towns"]},
)
_LIST = describe("The documents that are known", "DocumentList", errors=_ERRORS, query=(_NAMESPACE, _AFTER, _PAGE))
_DESCRIBE = describe("A document", "DocumentInfo", errors=(*_ERRORS, 404), query=(_NAMESPACE,))
_DELETE = describe(
    "Forget a document and everything that holds it", "DeletedDocument", errors=(*_ERRORS, 404), query=(_NAMESPACE,)
)
_INVALIDATE = describe(
    "Make states unreachable, by tag, tenant or model",
    "Invalidation",
    body="InvalidateBody",
    errors=(*_ERRORS, 413),
    example={"tag": "towns"},
)


class DocumentSurface:
    """Documents over HTTP."""

    def __init__(self, library: Library, gate: Gate, max_body_bytes: int) -> None:
        self._library = library
        self._gate = gate
        self._max_body_bytes = max_body_bytes

    def routes(self) -> APIRouter:
        """Where the endpoints stand. An id may hold slashes."""
        routes = APIRouter()
        routes.add_api_route("/v1/documents", self.register, methods=["POST"], **_REGISTER)
        routes.add_api_route("/v1/documents", self.list_all, methods=["GET"], **_LIST)
        routes.add_api_route("/v1/documents/{document_id:path}", self.describe, methods=["GET"], **_DESCRIBE)
        routes.add_api_route("/v1/documents/{document_id:path}", self.delete, methods=["DELETE"], **_DELETE)
        routes.add_api_route("/v1/invalidate", self.invalidate, methods=["POST"], **_INVALIDATE)
        return routes

    async def register(self, request: Request) -> Response:
        """`POST /v1/documents`."""
        caller = self._gate.admit(request, Scope.DOCUMENTS)
        body = read(DocumentBody, await read_json(request, self._max_body_bytes), "")
        namespace = replace(_namespace(caller, body.namespace), salt=body.cache_salt or "")
        done = await self._library.register(namespace, _draft(body))
        stored = "too_short" if done.reason == "too_short" else "not_stored" if done.reason else "stored"
        about = {"outcome": done.outcome, "status": stored, "reason": done.reason or None}
        return JSONResponse(_info(done.info) | about | {"removed": _removal(done.removal)})

    async def list_all(self, request: Request) -> Response:
        """`GET /v1/documents`."""
        caller = self._gate.admit(request, Scope.DOCUMENTS)
        namespace = _asked_namespace(caller, request)
        page = await self._library.page(namespace, request.query_params.get("after", ""), _limit(request))
        rows = [_info(each) for each in page.documents]
        last = rows[-1]["id"] if rows else None
        return JSONResponse({"object": "list", "data": rows, "last_id": last, "has_more": page.has_more})

    async def describe(self, request: Request, document_id: str) -> Response:
        """`GET /v1/documents/{id}`."""
        caller = self._gate.admit(request, Scope.DOCUMENTS)
        return JSONResponse(_info(await self._library.find(_asked_namespace(caller, request), document_id)))

    async def delete(self, request: Request, document_id: str) -> Response:
        """`DELETE /v1/documents/{id}`."""
        caller = self._gate.admit(request, Scope.DOCUMENTS)
        namespace = _asked_namespace(caller, request)
        removal = await self._library.invalidate(namespace, ScopeKind.DOCUMENT, document_id)
        about = {"id": document_id, "object": "document.deleted", "deleted": True}
        return JSONResponse(about | _removal(removal))

    async def invalidate(self, request: Request) -> Response:
        """`POST /v1/invalidate`."""
        caller = self._gate.admit(request, Scope.DOCUMENTS)
        body = read(InvalidateBody, await read_json(request, self._max_body_bytes), "")
        given = {name: getattr(body, name) for name in ("tag", "tenant", "model") if getattr(body, name) is not None}
        if len(given) != 1:
            raise PromptError("exactly one of tag, tenant and model must be given", param="body")
        ((kind, name),) = given.items()
        namespace = _namespace(caller, body.namespace)
        if kind == "model" or (kind == "tenant" and name != caller.tenant):
            require(caller, Scope.ADMIN)
        if kind == "tenant":
            namespace = Namespace(name)
        removal = await self._library.invalidate(namespace, ScopeKind(kind), name)
        return JSONResponse({"object": "invalidation", kind: name} | _removal(removal))


def _namespace(caller: Caller, asked: str | None) -> Namespace:
    """The caller's own, or the public one."""
    if asked is None:
        return caller.namespace()
    if asked != PUBLIC_TENANT:
        raise PromptError(f"namespace must be {PUBLIC_TENANT!r} or absent", param="namespace")
    require(caller, Scope.ADMIN)
    return Namespace(PUBLIC_TENANT)


def _asked_namespace(caller: Caller, request: Request) -> Namespace:
    return _namespace(caller, request.query_params.get("namespace"))


def _limit(request: Request) -> int:
    given = request.query_params.get("limit", str(_DEFAULT_PAGE))
    if not (given.isascii() and given.isdigit() and 0 < int(given[:9]) <= _MAX_PAGE):
        raise PromptError(f"limit must lie between 1 and {_MAX_PAGE}", param="limit")
    return int(given)


def _draft(body: DocumentBody) -> DocumentDraft:
    document = Document(_text(body), body.title or "", body.id or "")
    if not body.id:
        # The same text without an id is the same document.
        document = replace(document, document_id=f"doc-{document.digest.hex()[:32]}")
    return DocumentDraft(document, tuple(sorted(set(body.tags))))


def _text(body: DocumentBody) -> str:
    if (body.text is None) == (body.parts is None):
        raise PromptError(
            "exactly one of text and parts must be given", param="text", code="missing_required_parameter"
        )
    text = body.text if body.text is not None else "".join(_part(each, i) for i, each in enumerate(body.parts or []))
    if not text:
        raise PromptError("the document must not be empty", param="text" if body.parts is None else "parts")
    return text


def _part(value: object, index: int) -> str:
    path = f"parts[{index}]"
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and value.get("type", "text") != "text":
        raise PromptError(f"{path}.type must be 'text'", param=f"{path}.type", code="unsupported_content")
    return read(TextPart, value, path).text


def _info(info: DocumentInfo) -> dict[str, object]:
    is_registered = info.version > 0
    return {
        "id": info.document_id,
        "object": "document",
        "registered": is_registered,
        "title": info.title or None,
        "tags": list(info.tags),
        "version": info.version if is_registered else None,
        "digest": info.digest.hex() if is_registered else None,
        "tokens": info.num_tokens if is_registered else None,
        "pinned": info.is_pinned,
        "bytes": sum(state.size_bytes * len(state.holders) for state in info.states),
        "states": [_state(state) for state in info.states],
    }


def _state(state: StateInfo) -> dict[str, object]:
    return {
        "key": state.key_digest.hex(),
        "kind": state.kind,
        "tokens": state.num_tokens,
        "bytes": state.size_bytes,
        "holders": [{"worker": holder.worker_id, "tier": holder.tier} for holder in state.holders],
    }


def _removal(removal: Removal) -> dict[str, object]:
    """The receipt: from where how many bytes went. `dropped` once the worker has confirmed it."""
    copies = [
        {
            "worker": each.worker_id,
            "tier": each.tier,
            "entries": each.num_entries,
            "bytes": each.size_bytes,
            "dropped": each.is_dropped,
        }
        for each in removal.copies
    ]
    return {
        "documents": removal.num_documents,
        "entries": removal.num_entries,
        "bytes": sum(each.size_bytes for each in removal.copies),
        "copies": copies,
    }
