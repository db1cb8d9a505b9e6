"""The page at `/`: what is being served, and whether graphs really replay.

Owns its routes and their headers. The files are in the folder `page`, as a browser gets them, and
ask the other endpoints. Its paths need no key, and answer while a model loads.
"""

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from graphseed.server.state import ServerState

_TYPES: Final = {
    "app.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "views.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
}
PUBLIC_PATHS: Final = frozenset({"/", "/index.html", *(f"/page/{name}" for name in _TYPES)})
_HEADERS: Final = {
    # Nothing but the page's own files, and nothing asked of other servers.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def router(state: ServerState) -> APIRouter:
    """The page and its files; nothing where the settings have no page."""
    routes = APIRouter(include_in_schema=False)
    if not state.settings.has_ui:
        return routes
    folder = files("graphseed.server.watch") / "static"
    index = (folder / "index.html").read_bytes()
    contents = {name: (folder / name).read_bytes() for name in _TYPES}

    @routes.get("/")
    @routes.get("/index.html")
    async def page(request: Request) -> Response:
        inside = _of_prefix(request)
        if inside is not None:
            return Response(status_code=307, headers={"Location": inside})
        return _file(index, "text/html; charset=utf-8")

    for name, content in contents.items():
        routes.get(f"/page/{name}")(_sender(content, _TYPES[name]))
    return routes


def _sender(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return _file(content, kind)

    return send


def _file(content: bytes, kind: str) -> Response:
    return Response(content, media_type=kind, headers=dict(_HEADERS))


def _of_prefix(request: Request) -> str | None:
    """Where the page is, from a prefix without its last slash: its files' names are relative."""
    raw = request.scope.get("raw_path") or b"/"
    path = bytes(raw).partition(b"?")[0].decode("latin-1")
    if request.scope["path"] != "/" or path.endswith("/"):
        return None
    return f"{path.rpartition('/')[2]}/"
