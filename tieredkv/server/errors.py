"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

Knows the exception tree and HTTP statuses, no endpoint. Every error answer of the server is built here.
"""

from __future__ import annotations

import http
import logging
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tieredkv.errors import CapacityError, RequestError, TieredKVError

log = logging.getLogger("tieredkv.server")

INTERNAL_MESSAGE = "The server failed to process the request; its log has the details."
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
}


class JSONResponse(Response):
    """A JSON answer, encoded by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


class GenerationError(Exception):
    """The engine failed while it worked on the request (HTTP 500); the message is fit for the client."""


def error_object(message: str, *, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error answer; `code` defaults to the one that goes with `status`."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code or _CODES.get(status)}}


def describe(error: BaseException) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers for any exception. One that nobody foresaw is a 500 without its details."""
    if isinstance(error, RequestError):
        body = error_object(str(error), status=error.status, param=error.param, code=error.code)
        return error.status, body, {}
    if isinstance(error, CapacityError):
        headers = {"retry-after": str(error.retry_after_s)}
        return error.status, error_object(str(error), status=error.status), headers
    if isinstance(error, HTTPException):
        message = error.detail or http.HTTPStatus(error.status_code).phrase
        return error.status_code, error_object(message, status=error.status_code), dict(error.headers or {})
    if isinstance(error, GenerationError):
        return 500, error_object(str(error), status=500), {}
    return 500, error_object(INTERNAL_MESSAGE, status=500), {}


def error_response(error: BaseException) -> Response:
    """`error` as an HTTP answer."""
    status, body, headers = describe(error)
    return JSONResponse(body, status_code=status, headers=headers)


async def handle_error(request: Request, error: Exception) -> Response:
    """The exception handler of every route: what a handler raises on purpose becomes its answer."""
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        what = f"{request.method} {request.url.path}"
        reason = "Unknown path" if error.status_code == 404 else "Method not allowed"
        error = HTTPException(error.status_code, f"{reason}: {what}", dict(error.headers or {}))
    if isinstance(error, GenerationError):
        log.error("%s %s failed: %s", request.method, request.url.path, error)
    elif not isinstance(error, HTTPException | TieredKVError):
        log.exception("%s %s failed (request %s)", request.method, request.url.path, request.state.request_id)
        request.state.logged = True
    return error_response(error)
