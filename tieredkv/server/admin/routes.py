"""Routes of the admin API, made from the table of operations, and of its page and its description.

Knows starlette. Invariant: no handler runs before it is known who asks, and none that is for administrators for a tenant.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tieredkv.errors import RequestError
from tieredkv.server.admin import ui
from tieredkv.server.admin.access import ROOT, UI
from tieredkv.server.admin.call import Call, RecordResponse
from tieredkv.server.admin.openapi import document
from tieredkv.server.admin.operations import OPERATIONS, RESET, Operation
from tieredkv.server.service import Service


class _Endpoint:
    """The operations of one path, each behind the check of who may use it."""

    def __init__(self) -> None:
        self.by_method: dict[str, Operation] = {}

    async def serve(self, request: Request) -> Response:
        operation = self.by_method["GET" if request.method == "HEAD" else request.method]
        call = Call.of(request)
        if operation.admin_only and call.scope is not None:
            raise RequestError("This is for administrators.", status=403, code="forbidden")
        return await operation.handler(call)


def _routes(operations: Iterable[Operation]) -> list[BaseRoute]:
    by_path: dict[str, _Endpoint] = {}
    for operation in operations:
        by_path.setdefault(operation.path, _Endpoint()).by_method[operation.method] = operation
    # One route per path: the header `Allow` of a 405 then names all its methods.
    return [Route(path, each.serve, methods=list(each.by_method), name=path) for path, each in by_path.items()]


def admin_routes(service: Service, *, with_reset: bool) -> list[BaseRoute]:
    """Everything under `/admin`. `with_reset` tells whether the same application has `/reset_prefix_cache`."""
    described = document(service.names, service.engine.vocab_size, with_reset=with_reset)

    async def openapi(request: Request) -> Response:
        Call.of(request)
        return RecordResponse(described)

    return [
        *_routes(OPERATIONS),
        Route(f"{ROOT}/openapi.json", openapi, methods=["GET"]),
        Route(ROOT, ui.to_page, methods=["GET"]),
        Route(UI, ui.to_page, methods=["GET"]),
        Route(f"{UI}/{{path:path}}", ui.Page().serve, methods=["GET"]),
    ]


def reset_routes() -> list[BaseRoute]:
    """What of the admin API stays beside the API for requests."""
    return _routes([RESET])
