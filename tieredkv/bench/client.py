"""A lean client for OpenAI-style streaming: it measures servers that may share its few cores.

Job: send one streaming request and record what comes back (`request_stream`). While a response comes in, the client only
notes when each piece of bytes arrived; HTTP chunks, events and JSON are taken apart after the last byte, so that
measuring costs the server next to nothing.

It does not know which server it talks to, how servers are started, or what a good figure is.

Invariants:
- every request has a deadline, and a connection of its own;
- times are `time.perf_counter()` seconds, counted from before the connection is opened;
- an event's time is that of the byte that completed it; TTFT is the first event with a non-empty `choices`.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.parse
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tieredkv.bench.answer import printable, read_event

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class LoadError(Exception):
    """The server's answer was not what the caller asked for; the message quotes it."""


@dataclass(frozen=True, slots=True)
class Cut:
    """When to hang up: after `after_events` events, or `after_s` seconds after sending, whichever comes first.

    `reset` drops the connection at once (RST); otherwise it is closed in the ordinary way (FIN).
    """

    after_events: int | None = None
    after_s: float | None = None
    reset: bool = False


@dataclass(slots=True)
class StreamResult:
    """What one streaming request brought.

    `event_times_s` has one entry per event with a non-empty `choices`, relative to the start of the request. `tokens` is
    the server's own count (`usage.completion_tokens`), or the number of those events when it sent no usage. `done` says
    that `[DONE]` came, `cut` that this client hung up first; `error` says what went wrong otherwise.
    """

    status: int = 0
    text: str = ""
    tokens: int = 0
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None
    event_times_s: list[float] = field(default_factory=list)
    started_s: float = 0.0
    ended_s: float = 0.0
    done: bool = False
    cut: bool = False
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.done and self.error is None

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token. Raises `LoadError` when none came."""
        if not self.event_times_s:
            raise LoadError(f"no token came: status {self.status}, {self.error or 'empty answer'}")
        return self.event_times_s[0]

    @property
    def last_token_s(self) -> float:
        """`perf_counter` time of the last event with a token."""
        self.require_ok()
        return self.started_s + self.event_times_s[-1]

    @property
    def itl_s(self) -> float:
        """Mean seconds per token after the first one; needs two tokens or more."""
        if self.tokens < 2:
            raise LoadError(f"{self.tokens} tokens have no time between them")
        return (self.event_times_s[-1] - self.ttft_s) / (self.tokens - 1)

    def require_ok(self) -> StreamResult:
        """Itself, or `LoadError` saying why the request did not end well."""
        if not self.ok:
            raise LoadError(f"request failed with status {self.status}: {self.error or 'the stream ended early'}")
        return self


class _Recorder(asyncio.Protocol):
    """Sends one request and keeps what comes back as (arrival time, bytes); hangs up where `cut` says."""

    def __init__(self, request: bytes, cut: Cut | None) -> None:
        self.request = request
        self.cut = cut
        self.was_cut = False
        self.pieces: list[tuple[float, bytes]] = []
        self.num_events = 0
        self.closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.request)
        if self.cut is not None and self.cut.after_s is not None:
            asyncio.get_running_loop().call_later(self.cut.after_s, self.hang_up)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))
        if self.cut is not None and self.cut.after_events is not None:
            self.num_events += data.count(b"data: ")
            if self.num_events >= self.cut.after_events:
                self.hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(exc)

    def hang_up(self) -> None:
        if self.transport is None or self.closed.done() or self.transport.is_closing():
            return
        self.was_cut = True
        if self.cut is not None and self.cut.reset:
            self.transport.abort()
        else:
            self.transport.close()


async def request_stream(
    url: str,
    body: Mapping[str, Any],
    *,
    path: str = COMPLETIONS,
    cut: Cut | None = None,
    timeout_s: float = 120.0,
    headers: Mapping[str, str] | None = None,
) -> StreamResult:
    """POST `body` with `stream` and `stream_options.include_usage` set, and record the stream until it ends.

    `url` is where the server is, with `http` or `https`; `path` is appended to its path. Whatever the server does,
    including refusing the connection, is in the result; only a `url` that is none raises (`ValueError`).
    """
    address = parse_address(url)
    message = _request_bytes(
        address, path, {**body, "stream": True, "stream_options": {"include_usage": True}}, headers or {}
    )
    result = StreamResult(started_s=time.perf_counter())
    recorder = _Recorder(message, cut)
    lost: Exception | None = None
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().create_connection(
                lambda: recorder, address.host, address.port, ssl=address.is_tls or None
            )
            lost = await recorder.closed
    except TimeoutError:
        result.error = f"no end within {timeout_s:g} s"
    except OSError as error:
        result.error = f"cannot connect: {error}"
    except UnicodeError:
        # What sockets raise for a name that cannot be one.
        result.error = f"cannot connect: {address.host!r} is no name of a host"
    finally:
        if recorder.transport is not None and not recorder.transport.is_closing():
            recorder.transport.abort()
    result.ended_s = time.perf_counter()
    result.cut = recorder.was_cut
    _read_response(recorder.pieces, result)
    if result.error is None and not result.done and not result.cut:
        result.error = f"the connection ended early ({lost or 'no [DONE]'})"
    return result


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and the path below which its API lies (no slash at its end)."""

    host: str
    port: int
    is_tls: bool
    path: str


def parse_address(url: str) -> Address:
    """The parts of an `http` or `https` URL. Raises `ValueError` for anything else."""
    if not url.isprintable() or " " in url:
        raise ValueError(f"must be a URL without spaces and control characters, got {url!r}")
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"must be a URL such as http://127.0.0.1:8000, got {url!r}")
    if not parts.path.isascii():
        raise ValueError(f"must have a path in ASCII, percent-encoded where need be, got {url!r}")
    is_tls = parts.scheme == "https"
    return Address(parts.hostname, parts.port or (443 if is_tls else 80), is_tls, parts.path.rstrip("/"))


def _request_bytes(address: Address, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
    content = json.dumps(body).encode()
    host = f"[{address.host}]" if ":" in address.host else address.host
    lines = [
        f"POST {address.path}{path} HTTP/1.1",
        f"Host: {host}:{address.port}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
        "Connection: close",
        f"Content-Length: {len(content)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def _read_response(pieces: Sequence[tuple[float, bytes]], result: StreamResult) -> None:
    """Fill `result` from the recorded bytes; a response that stops anywhere is read as far as it goes."""
    wire = b"".join(data for _, data in pieces)
    head, separator, rest = wire.partition(b"\r\n\r\n")
    if not separator:
        return
    status_line, *header_lines = head.decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (h.partition(":") for h in header_lines)}
    try:
        result.status = int(status_line.split(" ", 2)[1])
    except (IndexError, ValueError):
        result.error = f"not an HTTP answer: {status_line[:80]!r}"
        return
    start = len(head) + len(separator)
    chunked = headers.get("transfer-encoding", "").lower() == "chunked"
    payload, origins = _dechunk(rest, start) if chunked else (rest, [(0, start)])
    if result.status != 200:
        said_why = printable(payload.decode(errors="replace").strip())[:500]
        result.error = said_why or f"status {result.status}"
        return
    ends, total = [], 0
    for _, data in pieces:
        total += len(data)
        ends.append(total)
    texts: list[str] = []
    for event, end in _events(payload):
        said = read_event(event)
        result.done = result.done or said.done
        result.error = said.error or result.error
        result.usage = said.usage or result.usage
        result.finish_reason = said.finish_reason or result.finish_reason
        if said.has_token:
            result.event_times_s.append(_arrival_s(pieces, ends, origins, end) - result.started_s)
            texts.append(said.text)
    result.text = "".join(texts)
    counted = (result.usage or {}).get("completion_tokens")
    result.tokens = len(result.event_times_s) if counted is None else counted


def _dechunk(rest: bytes, start: int) -> tuple[bytes, list[tuple[int, int]]]:
    """The payload of a chunked body, and for each chunk (offset in the payload, offset on the wire) of its first byte."""
    payload, origins, at = bytearray(), [], 0
    while (line_end := rest.find(b"\r\n", at)) >= 0:
        try:
            size = int(rest[at:line_end].split(b";")[0], 16)
        except ValueError:
            break
        if size <= 0:
            break
        begin = line_end + 2
        origins.append((len(payload), start + begin))
        payload += rest[begin : begin + size]
        at = begin + size + 2
    return bytes(payload), origins


def _events(payload: bytes) -> Iterator[tuple[bytes, int]]:
    """The data of each complete server-sent event, and the offset just past it."""
    separator = b"\r\n\r\n" if b"\r\n\r\n" in payload else b"\n\n"
    at = 0
    while (end := payload.find(separator, at)) >= 0:
        if payload.startswith(b"data:", at):
            yield payload[at + 5 : end].strip(), end + len(separator)
        at = end + len(separator)


def _arrival_s(
    pieces: Sequence[tuple[float, bytes]], ends: Sequence[int], origins: Sequence[tuple[int, int]], payload_end: int
) -> float:
    """When the payload's byte before `payload_end` arrived."""
    index = bisect_left(origins, (payload_end, 0)) - 1
    payload_start, wire_start = origins[index]
    return pieces[bisect_left(ends, wire_start + payload_end - payload_start)][0]
