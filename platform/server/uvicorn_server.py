"""uvicorn with signal handling of loraplex: SIGTERM drains, a second SIGTERM aborts.

Invariant: while draining, the socket stays open and new requests get 503, so no client sees a connection reset.
"""

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import structlog
import uvicorn
from fastapi import FastAPI

from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.observability.health import Health
from loraplex.platform.server.connection_limiter import ConnectionLimiter
from loraplex.platform.server.http_protocol import BoundedHttpProtocol
from loraplex.platform.startup_errors import PortTaken

LOG = structlog.get_logger("loraplex.serve")

BACKLOG = 2048
FLUSH_S = 3.0
ABORT_S = 1.0
KEEP_ALIVE_S = 30
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(slots=True)
class Shutdown:
    """State that signals change: the first one starts the drain, the second aborts it. During the start, the first cancels it."""

    drain: asyncio.Event = field(default_factory=asyncio.Event)
    abort: asyncio.Event = field(default_factory=asyncio.Event)
    starting: asyncio.Task[None] | None = None

    def install(self) -> None:
        """Handle SIGTERM and SIGINT on the running loop. During the start a signal cancels the current task."""
        self.starting = asyncio.current_task()
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def started(self) -> None:
        """End the start: from now on a signal drains instead of cancelling."""
        self.starting = None

    def _on_signal(self) -> None:
        if self.drain.is_set():
            self.abort.set()
        elif self.starting is not None:
            self.starting.cancel()
        self.drain.set()


class Server(uvicorn.Server):
    """A uvicorn server that installs no signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True)
class HttpListener:
    """A bound socket and the bounds of its connections; see `BoundedHttpProtocol` for `stall_s`."""

    socket: socket.socket
    limiter: ConnectionLimiter
    stall_s: float


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Bind a socket that does not listen yet, so that a taken port is known before anything is loaded.

    Raises `PortTaken`, which names `flag`.
    """
    try:
        facts = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise PortTaken(host, port, str(error), flag) from None
    if port and _is_listening(facts[0], facts[4]):
        raise PortTaken(host, port, "the port is taken by another process", flag)
    listener = socket.socket(facts[0], socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(facts[4])
    except OSError as error:
        listener.close()
        reason = "the port is taken by another process" if error.errno == errno.EADDRINUSE else error.strerror
        raise PortTaken(host, port, reason or str(error), flag) from None
    return listener


async def serve_until_stopped(
    app: FastAPI,
    listener: HttpListener,
    health: Health,
    engines: EnginePool,
    shutdown: Shutdown,
    drain_s: float,
) -> None:
    """Serve until a signal, then drain. Returns after the last response, or when its time is over."""
    server = _server(app, listener)
    serving = asyncio.create_task(server.serve(sockets=[listener.socket]))
    drain_requested = asyncio.create_task(shutdown.drain.wait())
    await asyncio.wait({serving, drain_requested}, return_when=asyncio.FIRST_COMPLETED)
    drain_requested.cancel()
    if not serving.done():
        health.draining = True
        await _drain(engines, shutdown, drain_s)
        server.should_exit = True
        await _finish(server, serving, shutdown)
    await serving


@asynccontextmanager
async def serving(app: FastAPI, listener: HttpListener, shutdown: Shutdown) -> AsyncIterator[None]:
    """Serve `app` until the block ends. An error that ends it earlier starts the drain and is raised after the block."""
    server, address = _server(app, listener), listener.socket.getsockname()
    task = asyncio.create_task(server.serve(sockets=[listener.socket]))

    def drain_if_failed(ended: "asyncio.Task[None]") -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            LOG.error("a listener failed; the server shuts down", address=address, reason=str(error))
            shutdown.drain.set()

    task.add_done_callback(drain_if_failed)
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        await task


async def _drain(engines: EnginePool, shutdown: Shutdown, drain_s: float) -> None:
    LOG.info("draining", requests=engines.open_requests, seconds=drain_s)
    ended = asyncio.create_task(engines.drain())
    aborted = asyncio.create_task(shutdown.abort.wait())
    await asyncio.wait({ended, aborted}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    if engines.open_requests:
        LOG.warning("ending requests that did not finish", requests=engines.open_requests)
        engines.fail_open("the server is shutting down")
    for task in (ended, aborted):
        task.cancel()


async def _finish(server: Server, serving: "asyncio.Task[None]", shutdown: Shutdown) -> None:
    limit = ABORT_S if shutdown.abort.is_set() else FLUSH_S + ABORT_S
    done, _ = await asyncio.wait({serving}, timeout=limit)
    if not done:
        server.force_exit = True


def _server(app: FastAPI, listener: HttpListener) -> Server:
    protocol = partial(BoundedHttpProtocol, limiter=listener.limiter, stall_s=listener.stall_s)
    config = uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]  # uvicorn only calls it
        loop="none",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(FLUSH_S),
    )
    return Server(config)


def _is_listening(family: int, address: tuple[object, ...]) -> bool:
    """Whether a process listens at `address`. Linux lets two processes bind one port while neither listens."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(address) == 0
