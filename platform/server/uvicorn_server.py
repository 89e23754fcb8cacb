"""uvicorn that drains: a first signal ends accepting, a second one aborts (`process_signals.py`).

Invariant: while draining, the socket stays open and new requests get 503, so no client sees a connection reset.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import structlog
import uvicorn
from fastapi import FastAPI

from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.observability.health import Health
from loraplex.platform.server.connection_limiter import ConnectionLimiter
from loraplex.platform.server.http_protocol import BoundedHttpProtocol
from loraplex.platform.server.process_signals import Shutdown

LOG = structlog.get_logger("loraplex.serve")

BACKLOG = 2048
FLUSH_S = 3.0
ABORT_S = 1.0
KEEP_ALIVE_S = 30


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
