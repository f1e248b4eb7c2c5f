"""The serving process: take the addresses, load the model, run until told to stop, drain, exit.

Knows sockets, signals and the terminal; no endpoint. The admin API is served beside the requests or, with `admin_port`, by a
second server in the same loop, which answers until the first has drained. The first SIGTERM or SIGINT starts draining: new
requests get 503, running ones may finish for `drain_timeout` seconds, the rest is aborted, and the process exits with 0.
The second one ends the process at once.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from rich.console import Console
from starlette.types import ASGIApp

from tieredkv import lean
from tieredkv.admin import Admin
from tieredkv.config import Config
from tieredkv.errors import ConfigError, TieredKVError
from tieredkv.runtime import release_free_memory
from tieredkv.server.admin.access import Access
from tieredkv.server.app import build_admin_app, build_app
from tieredkv.server.connection import BoundedProtocol
from tieredkv.server.display import LoadProgress, print_summary
from tieredkv.server.service import Service
from tieredkv.server.warm import check_prompt_file, deferred_prompts
from tieredkv.warm_job import DeferredPrompt
from tieredkv.warming import Warming

if TYPE_CHECKING:
    from tieredkv.engine import Engine

log = logging.getLogger("tieredkv.server")
KEEP_ALIVE_S = 65
# After the drain, for answers that are still on their way out.
FLUSH_S = 5


def bind(host: str, port: int, key: str = "port") -> socket.socket:
    """A listening TCP socket; clients that connect early wait in its backlog.

    Raises `ConfigError` that names the setting `key` when the address cannot be had.
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
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}", key=key) from None
    return sock


def serve(config: Config) -> int:
    """Run the server until a signal ends it; returns the exit code. Raises `ConfigError`, `UnsupportedModelError`."""
    level = config.server.log_level.upper()
    # Libraries are heard when something is wrong; `log_level` is about this program.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("tieredkv").setLevel(level)
    # Refuses keys that contradict each other, before anything slow.
    Access(config.admin.admin_key, config.server.api_key)
    warm_file = None if config.admin.warm is None else Path(config.admin.warm)
    with contextlib.ExitStack() as sockets:
        sock = sockets.enter_context(contextlib.closing(bind(config.server.host, config.server.port)))
        admin_sock = None
        if config.admin.admin_port is not None:
            admin_sock = sockets.enter_context(
                contextlib.closing(bind(config.server.host, config.admin.admin_port, "admin_port"))
            )
        lines = [] if warm_file is None else check_prompt_file(warm_file)
        from tieredkv.engine import Engine

        # This process only serves: before anything imports transformers.
        lean.import_transformers()
        gc.enable()
        with LoadProgress(Console()) as progress:
            engine = Engine.load(config, progress.update)
        warming = Warming(engine)
        app, service = build_app(engine, config, Admin(engine, config, warming))
        servers = Servers(engine, config, service, warming)
        servers.add(app, sock)
        if admin_sock is not None:
            servers.add(build_admin_app(service, config), admin_sock)
        if warm_file is not None:
            servers.to_warm = deferred_prompts(warm_file, lines, engine.tokenizer, config.server.api_key)
        engine.start()
        try:
            # What loading left behind lives as long as the process: keep it out of every later collection.
            gc.collect()
            gc.freeze()
            release_free_memory()
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(servers.run())
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
            # The admin API wants to know the peer itself, not what headers say of it.
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=FLUSH_S,
        ),
        on_started,
    )


class Servers:
    """The HTTP servers of one engine: the first for requests, the last for the admin API; they may be the same.

    `run` serves until a signal ends it. `to_warm` is warmed from the start.
    """

    def __init__(self, engine: Engine, config: Config, service: Service, warming: Warming) -> None:
        self.to_warm: Sequence[DeferredPrompt] = ()
        self._engine = engine
        self._config = config
        self._service = service
        self._warming = warming
        self._servers: list[uvicorn.Server] = []
        self._sockets: list[socket.socket] = []
        self._num_started = 0
        self._drain: asyncio.Task[None] | None = None

    def add(self, app: ASGIApp, sock: socket.socket) -> None:
        self._servers.append(make_server(app, self._config, self._on_started))
        self._sockets.append(sock)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        if self.to_warm:
            self._warming.start(self.to_warm, kind="start", name=self._config.admin.warm)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._warm_pins())
            for server, sock in zip(self._servers, self._sockets, strict=True):
                group.create_task(server.serve(sockets=[sock]))

    async def _warm_pins(self) -> None:
        """Whatever comes of it, requests are served."""
        if self._service.admin is not None:
            try:
                await self._service.admin.warm_pins()
            except TieredKVError as error:
                log.warning("what the pins miss is not brought up: %s", error)

    def _on_started(self) -> None:
        self._num_started += 1
        if self._num_started == len(self._servers):
            addresses = [sock.getsockname() for sock in self._sockets]
            print_summary(Console(), self._engine, self._service.names, addresses[0], addresses[-1])

    def _on_signal(self, number: int) -> None:
        if self._drain is not None:
            os._exit(128 + number)
        self._drain = asyncio.get_running_loop().create_task(self._stop())

    async def _stop(self) -> None:
        service, engine = self._service, self._engine
        service.begin_drain()
        try:
            await self._warming.close()
            if engine.num_unfinished:
                timeout_s = self._config.server.drain_timeout
                log.info("stopping: %d running requests have %g s to finish", engine.num_unfinished, timeout_s)
            if not await engine.wait_drained(self._config.server.drain_timeout):
                log.warning("aborting the requests that still run")
                engine.abort_all()
                await engine.wait_drained(FLUSH_S)
        finally:
            service.followers.close()
            for server in self._servers:
                server.should_exit = True
