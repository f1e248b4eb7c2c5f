"""Request bodies: read with a limit, decoded strictly.

Knows no endpoint. Raises `RequestError` for everything that is not one JSON object of acceptable size: 413 over the
limit (also without a content-length), 415 for another media type, 400 for what is not valid JSON. orjson refuses NaN,
Infinity, lone surrogates, raw control characters and nesting deeper than 1024 by itself, and reads integers beyond 64
bits as floats, which the integer fields then refuse.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tieredkv.errors import RequestError
from tieredkv.server.errors import error_response

LINGER_S = 2.0


class BodyTooLargeError(RequestError):
    """The body is larger than the server accepts."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body is larger than {limit} bytes.", status=413, code="request_too_large")
        self.limit = limit


class TooLargeResponse(Response):
    """413, then close: what the client is still sending is dropped for a moment first.

    Closing a socket with unread data resets the connection, and the client may lose the answer; a client that sends
    its whole body before it reads gets the chance to do so.
    """

    def __init__(self, error: BodyTooLargeError) -> None:
        answer = error_response(error)
        super().__init__(answer.body, 413, {"connection": "close"}, media_type="application/json")
        self._budget = max(error.limit, 1 << 20)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                dropped = 0
                while dropped < self._budget:
                    message = await receive()
                    dropped += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        break
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The body of `request` as a JSON object, at most `limit` bytes long."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise RequestError("The content type must be application/json.", status=415)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestError("Compressed bodies are not accepted.", status=415)
    raw = await _read(request, limit)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.")
    return body


async def _read(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise BodyTooLargeError(limit)
    parts: list[bytes] = []
    total = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        total += len(part)
        if total > limit:
            raise BodyTooLargeError(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
