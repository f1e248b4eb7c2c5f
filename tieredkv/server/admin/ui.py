"""The page under `/admin/ui`: static files of the package, served from memory.

Knows no content. Invariants: only files that lay in the folder when the server started can be asked for, each under its own
name, so no path leads out of it; a browser runs and loads nothing but these files.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "ui"
INDEX = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".md": "text/plain; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
_HEADERS = {
    # Always ask, so that a new version is seen at once; an unchanged file costs a 304.
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


def _read(path: Path) -> _File:
    content = path.read_bytes()
    return _File(
        content,
        _TYPES.get(path.suffix.lower(), "application/octet-stream"),
        f'"{hashlib.blake2b(content, digest_size=16).hexdigest()}"',
    )


class Page:
    """The files below `folder` as they are now."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {
            path.relative_to(folder).as_posix(): _read(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        }

    async def serve(self, request: Request) -> Response:
        """`GET /admin/ui/{path}`. Raises `HTTPException` (404)."""
        file = self._files.get(request.path_params["path"] or INDEX)
        if file is None:
            raise HTTPException(404)
        headers = _HEADERS | {"etag": file.etag}
        known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if file.etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers | {"content-type": file.media_type})


async def to_page(request: Request) -> Response:
    """`/admin` and `/admin/ui` lead to the page. Relative, so that a path prefix of a proxy survives."""
    last = request.url.path.rpartition("/")[2]
    return Response(status_code=307, headers={"location": "ui/" if last == "ui" else "admin/ui/"})
