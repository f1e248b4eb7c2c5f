"""The applications: routes, error handlers and the entrance in front of them.

The admin API is part of the one for requests unless `admin_port` gives it an application of its own. Knows no socket and no
signal: `server.main` runs it. Importing it loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, ExceptionHandler

from tieredkv.config import Config
from tieredkv.errors import TieredKVError
from tieredkv.server import endpoints
from tieredkv.server.admin.access import Access
from tieredkv.server.admin.routes import admin_routes, reset_routes
from tieredkv.server.body import BodyTooLargeError, TooLargeResponse
from tieredkv.server.chat import create_chat_completion
from tieredkv.server.completions import create_completion
from tieredkv.server.entrance import Entrance
from tieredkv.server.errors import GenerationError, handle_error
from tieredkv.server.face import Engine
from tieredkv.server.service import Service

if TYPE_CHECKING:
    from tieredkv.admin import Admin

PROBES = [
    Route("/health", endpoints.health, methods=["GET"]),
    Route("/version", endpoints.version, methods=["GET"]),
    Route("/metrics", endpoints.metrics, methods=["GET"]),
]
ROUTES = [
    Route("/v1/models", endpoints.list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", endpoints.get_model, methods=["GET"]),
    Route("/v1/completions", create_completion, methods=["POST"]),
    Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
    Route("/tokenize", endpoints.tokenize, methods=["POST"]),
    Route("/detokenize", endpoints.detokenize, methods=["POST"]),
    *PROBES,
]


async def _too_large(request: Request, error: Exception) -> Response:
    return TooLargeResponse(error) if isinstance(error, BodyTooLargeError) else await handle_error(request, error)


async def _client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this answer; its status is for the access log."""
    return Response(status_code=499)


def build_app(engine: Engine, config: Config, admin: Admin | None = None) -> tuple[ASGIApp, Service]:
    """The ASGI application that serves `engine`, and its state. Without an `admin` there is no admin API.

    Raises `ConfigError` for keys that contradict each other.
    """
    service = Service(engine, config, admin)
    routes: list[BaseRoute] = [*ROUTES]
    if admin is not None:
        routes += reset_routes()
        if config.admin.admin_port is None:
            routes += admin_routes(service, with_reset=True)
    return _build(routes, service, config), service


def build_admin_app(service: Service, config: Config) -> ASGIApp:
    """The admin API of `service`, and the probes that its page reads, for a port of its own."""
    return _build([*admin_routes(service, with_reset=False), *PROBES], service, config)


def _build(routes: Sequence[BaseRoute], service: Service, config: Config) -> ASGIApp:
    handlers: Mapping[Any, ExceptionHandler] = {
        HTTPException: handle_error,
        TieredKVError: handle_error,
        GenerationError: handle_error,
        BodyTooLargeError: _too_large,
        ClientDisconnect: _client_gone,
        Exception: handle_error,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.state.service = service
    access = None if service.admin is None else Access(config.admin.admin_key, config.server.api_key)
    return Entrance(app, config.server.api_key, access)
