"""The page at `/console`: what the deployment does now, for administrators. It holds no text of prompts or documents."""

import secrets
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse
from jinja2 import Environment, StrictUndefined

from services.common.errors import HypicError
from services.router.adapters.auth import Gate
from services.router.adapters.console_view import STAGES, bytes_text, seconds_text, tier_totals, view_request
from services.router.domain.recent import RecentRequests
from services.router.domain.store import Eviction, StoreDirectory, WorkerStatuses
from services.router.domain.tenancy import Scope

__all__ = ["ConsoleSurface"]

_REFRESH_SECONDS = 5


@dataclass(frozen=True, slots=True)
class _CacheService:
    """trouble: why it does not answer; empty where it does."""

    trouble: str
    evictions: tuple[Eviction, ...]


class ConsoleSurface:
    """Rendered here, without scripts; the page loads nothing, and asks for itself anew every few seconds."""

    def __init__(self, gate: Gate, recent: RecentRequests, workers: WorkerStatuses, store: StoreDirectory) -> None:
        self._gate = gate
        self._recent = recent
        self._workers = workers
        self._store = store
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        environment.filters.update(bytes=bytes_text, seconds=seconds_text)
        self._template = environment.from_string((files(__package__) / "console.html").read_text())

    def routes(self) -> APIRouter:
        """One page."""
        routes = APIRouter()
        routes.add_api_route("/console", self.show, methods=["GET"], include_in_schema=False)
        return routes

    async def show(self, request: Request) -> Response:
        """`GET /console`; `?refresh=off` stands still."""
        self._gate.admit_browser(request, Scope.ADMIN)
        nonce = secrets.token_urlsafe(16)
        workers = self._workers.statuses()
        page = self._template.render(
            nonce=nonce,
            refresh_seconds=0 if request.query_params.get("refresh") == "off" else _REFRESH_SECONDS,
            stages=STAGES,
            requests=[view_request(record) for record in self._recent.newest_first()],
            workers=workers,
            tiers=tier_totals(workers),
            cache=await self._ask_cache(),
        )
        return HTMLResponse(page, headers=_headers(nonce))

    async def _ask_cache(self) -> _CacheService:
        try:
            return _CacheService("", await self._store.evictions())
        except HypicError as error:
            return _CacheService(str(error), ())


def _headers(nonce: str) -> dict[str, str]:
    policy = (
        f"default-src 'none'; style-src 'nonce-{nonce}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "content-security-policy": policy,
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
