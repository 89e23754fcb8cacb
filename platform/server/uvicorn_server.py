"""uvicorn that drains: a first signal ends accepting, a second one aborts (`process_signals.py`).

Invariant: while draining, the socket stays open and every response ends its connection. New requests are served until proxies
have had time to see that this gateway is not ready, then get 503: so no client sees a connection reset.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import structlog
import uvicorn
from fastapi import FastAPI

from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.observability.health import Health
from loraplex.platform.server.certificate import ServerCertificate
from loraplex.platform.server.connection_limiter import ConnectionLimiter, Place
from loraplex.platform.server.http_protocol import BoundedHttpProtocol
from loraplex.platform.server.process_signals import Shutdown
from loraplex.platform.server.tls_listener import TlsListener

LOG = structlog.get_logger("loraplex.serve")

BACKLOG = 2048
# What a response that ends with an error may take: its usage is in the journal first, for which a slow disk has 5 s.
FLUSH_S = 8.0
ABORT_S = 1.0
KEEP_ALIVE_S = 30


@dataclass(frozen=True, slots=True)
class HttpListener:
    """A bound socket and the bounds of its connections. Without `certificate`: HTTP."""

    socket: socket.socket
    limiter: ConnectionLimiter
    certificate: ServerCertificate | None = None


ConnectionProtocol: TypeAlias = Callable[..., BoundedHttpProtocol]
"""Makes the protocol of a connection, as uvicorn calls it."""


class Server(uvicorn.Server):
    """A uvicorn server of one listener that installs no signal handlers."""

    def __init__(self, config: uvicorn.Config, listener: HttpListener, protocol: ConnectionProtocol) -> None:
        super().__init__(config)
        self._listener = listener
        self._connection = protocol

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, with a certificate by `TlsListener`."""
        certificate = self._listener.certificate
        if certificate is None:
            await super().startup(sockets)
            return
        listener = self._listener
        tls = TlsListener(listener.socket, certificate, listener.limiter, self._protocol)
        tls.start(BACKLOG)
        self.servers = [tls]  # type: ignore[list-item]  # uvicorn only closes it and waits
        self.started = True

    def _protocol(self, place: Place) -> asyncio.Protocol:
        return self._connection(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state, place=place
        )


async def serve_until_stopped(
    app: FastAPI,
    listener: HttpListener,
    health: Health,
    engines: EnginePool,
    shutdown: Shutdown,
    *,
    grace_s: float,
    drain_s: float,
) -> None:
    """Serve until a signal, then drain: after SIGTERM new requests are taken for `grace_s` more, then those in progress have
    `drain_s`. Returns after the last response, or when its time is over.
    """
    server = _server(app, listener, lambda: health.draining)
    serving = asyncio.create_task(server.serve(sockets=[listener.socket]))
    drain_requested = asyncio.create_task(shutdown.drain.wait())
    await asyncio.wait({serving, drain_requested}, return_when=asyncio.FIRST_COMPLETED)
    drain_requested.cancel()
    if not serving.done():
        health.draining = True
        if shutdown.is_announced and grace_s:
            await _until_proxies_know(shutdown, grace_s)
        health.refusing, began = True, time.monotonic()
        await _drain(engines, shutdown, drain_s)
        server.should_exit = True
        await _finish(server, serving, shutdown)
        LOG.info("drained", seconds=round(time.monotonic() - began, 1))
    await serving


@asynccontextmanager
async def serving(app: FastAPI, listener: HttpListener, shutdown: Shutdown) -> AsyncIterator[None]:
    """Serve `app` until the block ends. An error that ends it earlier starts the drain and is raised after the block."""
    server, address = _server(app, listener, _never), listener.socket.getsockname()
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


async def _until_proxies_know(shutdown: Shutdown, seconds: float) -> None:
    LOG.info("not ready any more, still taking requests", seconds=seconds)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await shutdown.abort.wait()


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


def _never() -> bool:
    return False


def _server(app: FastAPI, listener: HttpListener, is_draining: Callable[[], bool]) -> Server:
    protocol = partial(BoundedHttpProtocol, limiter=listener.limiter, is_draining=is_draining)
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
    return Server(config, listener, protocol)
