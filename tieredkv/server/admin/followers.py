"""`GET /admin/events`: what the tiers gain and lose, as server-sent events.

    id: EPOCH-SEQUENCE          an event, or the last part of a snapshot: a reader may go on from here
    event: snapshot | stored | removed | gap | error
    data: the record as JSON

A comment goes out when nothing else has for `KEEP_ALIVE_S`, so that proxies keep the connection. Knows the records; no tier.

Invariants: one event at a time is taken from the source, and the next only when the connection has taken it, so a slow
reader costs a bounded amount of memory here; whatever ends a stream, its source is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import orjson

from tieredkv.errors import CapacityError
from tieredkv.reports import CacheEvent, EventGap, EventSnapshot
from tieredkv.server.errors import describe, log
from tieredkv.server.sse import EventStream

KEEP_ALIVE_S = 15.0
MAX_STREAMS = 32
_KEEP_ALIVE = b": keep-alive\n\n"
Record = CacheEvent | EventSnapshot | EventGap


class Followers:
    """The open event streams of one server. `close` ends them all: they would outlast any patience at shutdown."""

    def __init__(self, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self._keep_alive_s = keep_alive_s
        self._open: set[asyncio.Event] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        self._closed = True
        for ended in self._open:
            ended.set()

    def follow(self, source: AsyncIterator[Record], epoch: str) -> EventStream:
        """An answer that streams `source`. `epoch` is that of the events before the first snapshot.

        Raises `CapacityError`: 503 after `close`, 429 when too many streams are open.
        """
        if self._closed:
            raise CapacityError("The server is shutting down.", status=503, retry_after_s=10)
        if len(self._open) >= MAX_STREAMS:
            raise CapacityError(f"{MAX_STREAMS} event streams are open already; close one.")
        ended = asyncio.Event()
        self._open.add(ended)
        return EventStream(self._encode(source, epoch, ended), lambda: self._open.discard(ended))

    async def _encode(
        self, source: AsyncIterator[Record], epoch: str, ended: asyncio.Event
    ) -> AsyncGenerator[bytes, None]:
        end = asyncio.create_task(ended.wait())
        following: asyncio.Task[Record] | None = None
        try:
            while not ended.is_set():
                following = following or asyncio.create_task(_next(source))
                await asyncio.wait((following, end), timeout=self._keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    record = following.result()
                    following = None
                    epoch = epoch if isinstance(record, CacheEvent) else record.epoch
                    yield encode(record, epoch)
                elif not end.done():
                    yield _KEEP_ALIVE
        except StopAsyncIteration:
            pass
        except Exception as error:
            # The status line is long gone.
            log.exception("an event stream failed")
            yield b"event: error\ndata: " + orjson.dumps(describe(error)[1]) + b"\n\n"
        finally:
            for task in (end, following):
                if task is not None and not task.done():
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                        await task
            if isinstance(source, AsyncGenerator):
                await source.aclose()


async def _next(source: AsyncIterator[Record]) -> Record:
    return await anext(source)


def encode(record: Record, epoch: str) -> bytes:
    """One record as one event. Only what a reader can go on from has an id."""
    if isinstance(record, CacheEvent):
        name, is_whole = record.kind, True
    elif isinstance(record, EventSnapshot):
        name, is_whole = "snapshot", record.part == record.num_parts - 1
    else:
        name, is_whole = "gap", False
    head = f"id: {epoch}-{record.sequence}\nevent: {name}\n" if is_whole else f"event: {name}\n"
    return head.encode() + b"data: " + orjson.dumps(record, option=orjson.OPT_NON_STR_KEYS) + b"\n\n"
