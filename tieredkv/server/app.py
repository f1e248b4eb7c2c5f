"""The application: routes, error handlers and the gate in front of them.

Knows no socket and no signal: `server.main` runs it. Importing it loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, ExceptionHandler

from tieredkv.config import Config
from tieredkv.errors import TieredKVError
from tieredkv.server import endpoints
from tieredkv.server.body import BodyTooLargeError, TooLargeResponse
from tieredkv.server.chat import create_chat_completion
from tieredkv.server.completions import create_completion
from tieredkv.server.errors import GenerationError, handle_error
from tieredkv.server.face import Engine
from tieredkv.server.gate import Gate
from tieredkv.server.service import Service

ROUTES = [
    Route("/v1/models", endpoints.list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", endpoints.get_model, methods=["GET"]),
    Route("/v1/completions", create_completion, methods=["POST"]),
    Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
    Route("/tokenize", endpoints.tokenize, methods=["POST"]),
    Route("/detokenize", endpoints.detokenize, methods=["POST"]),
    Route("/health", endpoints.health, methods=["GET"]),
    Route("/version", endpoints.version, methods=["GET"]),
    Route("/metrics", endpoints.metrics, methods=["GET"]),
]


async def _too_large(request: Request, error: Exception) -> Response:
    return TooLargeResponse(error) if isinstance(error, BodyTooLargeError) else await handle_error(request, error)


async def _client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this answer; its status is for the access log."""
    return Response(status_code=499)


def build_app(engine: Engine, config: Config) -> tuple[ASGIApp, Service]:
    """The ASGI application that serves `engine`, and its state."""
    service = Service(engine, config)
    handlers: Mapping[Any, ExceptionHandler] = {
        HTTPException: handle_error,
        TieredKVError: handle_error,
        GenerationError: handle_error,
        BodyTooLargeError: _too_large,
        ClientDisconnect: _client_gone,
        Exception: handle_error,
    }
    app = Starlette(routes=ROUTES, exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.state.service = service
    return Gate(app, config.server.api_key), service
