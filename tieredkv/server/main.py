"""The serving process: take the address, load the model, run until told to stop, drain, exit.

Knows sockets, signals and the terminal; no endpoint. The first SIGTERM or SIGINT starts draining: new requests get 503,
running ones may finish for `drain_timeout` seconds, the rest is aborted, and the process exits with 0. The second one
ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn
from rich.console import Console
from starlette.types import ASGIApp

from tieredkv.config import Config
from tieredkv.errors import ConfigError
from tieredkv.server.app import build_app
from tieredkv.server.connection import BoundedProtocol
from tieredkv.server.display import LoadProgress, print_summary
from tieredkv.server.service import Service

if TYPE_CHECKING:
    from tieredkv.engine import Engine

log = logging.getLogger("tieredkv.server")
KEEP_ALIVE_S = 65
# After the drain, for answers that are still on their way out.
FLUSH_S = 5


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; clients that connect early wait in its backlog.

    Raises `ConfigError` when the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot resolve {host!r}: {error}", key="host") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # With SO_REUSEADDR only listening shows that another process has the address.
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}", key="port") from None
    return sock


def serve(config: Config) -> int:
    """Run the server until a signal ends it; returns the exit code. Raises `ConfigError`, `UnsupportedModelError`."""
    level = config.server.log_level.upper()
    # Libraries are heard when something is wrong; `log_level` is about this program.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("tieredkv").setLevel(level)
    sock = bind(config.server.host, config.server.port)
    with contextlib.closing(sock):
        from tieredkv.engine import Engine

        with LoadProgress(Console()) as progress:
            engine = Engine.load(config, progress.update)
        app, service = build_app(engine, config)
        engine.start()
        try:
            # What loading left behind lives as long as the process: keep it out of every later collection.
            gc.collect()
            gc.freeze()
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(_run(app, service, engine, config, sock))
        finally:
            saved = engine.close(config.server.drain_timeout)
            gc.unfreeze()
    log.info("stopped" if saved else "stopped; not all blocks could be saved in time")
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, and with a call when it accepts connections."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_started()


def make_server(app: ASGIApp, config: Config, on_started: Callable[[], None]) -> uvicorn.Server:
    """The HTTP server for `app`; run it with `serve(sockets=[...])`."""
    level = config.server.log_level
    return _Server(
        uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="info" if level == "debug" else "warning",
            access_log=level == "debug",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=FLUSH_S,
        ),
        on_started,
    )


async def _run(app: ASGIApp, service: Service, engine: Engine, config: Config, sock: socket.socket) -> None:
    server = make_server(app, config, lambda: print_summary(Console(), engine, service.names, sock.getsockname()))
    drain: asyncio.Task[None] | None = None

    def on_signal(number: int) -> None:
        nonlocal drain
        if drain is not None:
            os._exit(128 + number)
        drain = asyncio.get_running_loop().create_task(_drain(service, engine, server, config.server.drain_timeout))

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    await server.serve(sockets=[sock])


async def _drain(service: Service, engine: Engine, server: uvicorn.Server, timeout_s: float) -> None:
    service.begin_drain()
    if engine.num_unfinished:
        log.info("stopping: %d running requests have %g s to finish", engine.num_unfinished, timeout_s)
    try:
        if not await engine.wait_drained(timeout_s):
            log.warning("aborting the requests that still run")
            engine.abort_all()
            await engine.wait_drained(FLUSH_S)
    finally:
        server.should_exit = True
