"""Connections with a bound on what they may buffer outside of bodies.

llhttp takes request lines, headers, chunk extensions and trailers of any length, and uvicorn keeps them until the
request is complete: one endless header would fill the memory. Bodies are bounded by flow control and by the limit of
`server.body`. Invariant: at most `MAX_HEAD_NBYTES` and one read of the socket are taken in between two steps of progress,
which are the end of a head, a part of a body, and the end of a message.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_NBYTES = 64 * 1024


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which closes a connection that sends a head without end."""

    _num_pending = 0

    def data_received(self, data: bytes) -> None:
        self._num_pending += len(data)
        super().data_received(data)
        if self._num_pending > MAX_HEAD_NBYTES and not self.transport.is_closing():
            # A response may be under way, so there is no room for an answer of our own.
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._num_pending = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_pending = 0
        super().on_message_complete()
