"""The page at ``/``: static files from this package."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import PurePath

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from millpond.server.errors import RequestError

router = APIRouter(include_in_schema=False)

_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Only this server's own files and responses; the content of a text can never run as a script.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # Revalidated each time (304): a page of one release never runs a script of another.
    "Cache-Control": "no-cache",
    "Vary": "Accept",
}


@dataclass(frozen=True, kw_only=True)
class _File:
    content: bytes
    headers: dict[str, str]


@cache
def _files() -> dict[str, _File]:
    """Every file of the page by name, with its headers."""
    files = {}
    root = resources.files("millpond.server.api.page")
    for folder in (root, root / "parts", root / "tools"):  # all of them under one path
        for entry in folder.iterdir():
            kind = _TYPES.get(PurePath(entry.name).suffix)
            if kind is not None:
                content = entry.read_bytes()
                tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
                files[entry.name] = _File(content=content, headers={**_HEADERS, "Content-Type": kind, "ETag": tag})
    return files


def _response(request: Request, name: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise RequestError(f"The page has no file {name!r}.", status=404, type="NotFoundError")
    cached_tags = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if cached_tags & {file.headers["ETag"], "*"}:
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)


@router.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    """The page, for browsers; Ollama's clients ask here whether it runs."""
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse("Ollama is running", headers={"Vary": "Accept"})
    return _response(request, _INDEX)


@router.api_route("/page/{name}", methods=["GET", "HEAD"])
async def page_file(request: Request, name: str) -> Response:
    """A file of the page."""
    return _response(request, name)
