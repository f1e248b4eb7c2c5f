"""Server-sent events, and handlers that stop when their client has gone.

Knows no payload. One `send` per event or group of events, no comments, `[DONE]` at the end also after an error.
Invariant: whatever ends the stream (end, error, disconnect, cancellation), the source's `close` is called.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tieredkv.errors import TieredKVError
from tieredkv.server.errors import GenerationError, describe, log

DONE = b"data: [DONE]\n\n"
T = TypeVar("T")


def event(payload: Any) -> bytes:
    """`payload` as one event."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


class EventStream(Response):
    """Streams `events`, each item being the bytes of one or more whole events."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.closing(self), contextlib.suppress(ClientDisconnect):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await until_disconnect(receive, self._pump(send))

    async def _pump(self, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._events):
                async for data in self._events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            if isinstance(error, GenerationError):
                log.error("a stream failed: %s", error)
            elif not isinstance(error, TieredKVError | OSError):
                log.exception("a stream failed")
            data = event(describe(error)[1]) + DONE
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(receive: Callable[[], Awaitable[Message]], work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects; then `ClientDisconnect` is raised.

    `receive` must have delivered the whole request body before.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_wait_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        pending = [each for each in (task, watch) if not each.done()]
        for each in pending:
            each.cancel()
        if pending:
            await asyncio.wait(pending)


async def _wait_disconnect(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
