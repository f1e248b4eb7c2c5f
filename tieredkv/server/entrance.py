"""The outermost layer of the server: request ids, API keys, and the last resort for unforeseen exceptions.

Plain ASGI, so that it costs a streamed token next to nothing. Knows no endpoint except those that need no key, and leaves
the admin API's paths to its `Access`. Invariants: no request reaches a handler without a valid key when keys are
configured; every answer carries `x-request-id`; no exception of a handler reaches the HTTP server.
"""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Sequence
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tieredkv.errors import RequestError
from tieredkv.server.errors import error_response, log

OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Access(Protocol):
    """Decides about the paths that have rules of their own: those of the admin API."""

    def covers(self, path: str) -> bool: ...

    def admit(self, scope: Scope) -> object:
        """Who sent the request. Raises `RequestError` for those who may not."""


def match_key(keys: Sequence[bytes], given: bytes) -> int | None:
    """Index of the key that equals `given`, or None. Takes the same time whichever key matches, or none."""
    found = None
    for index, key in enumerate(keys):
        if hmac.compare_digest(key, given):
            found = index
    return found


class Entrance:
    """Wraps the application. `scope["state"]` gets `request_id`, `api_key` (None without configured keys), and for paths that
    `access` covers `identity`, what it said.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str] = (), access: Access | None = None) -> None:
        self._app = app
        self._access = access
        self._texts = list(api_keys)
        self._keys = [key.encode("utf-8") for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value for name, value in scope["headers"] if name in (b"authorization", b"x-request-id")}
        request_id = headers.get(b"x-request-id", b"")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex.encode()
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode("ascii")
        state["api_key"] = None
        try:
            if self._access is not None and self._access.covers(scope["path"]):
                state["identity"] = self._access.admit(scope)
            elif self._keys and scope["path"] not in OPEN_PATHS:
                state["api_key"] = self._texts[self._find_key(headers.get(b"authorization", b""))]
        except RequestError as error:
            refusal = error_response(error)
            if error.status == 401:
                refusal.headers["www-authenticate"] = "Bearer"
            await refusal(scope, receive, send_with_id)
            return
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if "logged" not in state:
                log.exception("%s %s failed (request %s)", scope["method"], scope["path"], state["request_id"])
            if not started:
                await error_response(error)(scope, receive, send_with_id)

    def _find_key(self, header: bytes) -> int:
        found = match_key(self._keys, bearer(header))
        if found is None:
            raise RequestError("Missing or wrong API key.", status=401, code="invalid_api_key")
        return found


def bearer(header: bytes) -> bytes:
    """The key in the value of an `Authorization` header, empty if there is none."""
    scheme, _, key = header.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
