"""The drain of the API's listener by its signals, and a second listener, whose failure is not left unnoticed."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse
from tests.platform.engines.managed_engine import Managed

from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.observability.health import Health
from loraplex.platform.observability.metrics import Metrics
from loraplex.platform.server.connection_limiter import ConnectionLimiter
from loraplex.platform.server.listening import bind
from loraplex.platform.server.process_signals import SIGNALS, Shutdown
from loraplex.platform.server.uvicorn_server import (
    HttpListener,
    Server,
    serve_until_stopped,
    serving,
)
from loraplex.tenants.admission.config import AdmissionConfig


@pytest.fixture
def listener() -> Iterator[HttpListener]:
    with bind("127.0.0.1", 0) as bound:
        yield HttpListener(bound, ConnectionLimiter(10, 10))


async def test_a_listener_that_fails_starts_the_drain_and_raises_its_error(
    listener: HttpListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        await asyncio.sleep(0)
        raise OSError("no file descriptor is left")

    monkeypatch.setattr(Server, "serve", fail)
    shutdown = Shutdown()
    with pytest.raises(OSError, match="no file descriptor"):
        async with serving(FastAPI(), listener, shutdown), asyncio.timeout(60):
            await shutdown.drain.wait()
            assert not shutdown.abort.is_set()


async def test_a_listener_that_ends_with_its_block_starts_no_drain(listener: HttpListener) -> None:
    shutdown, port = Shutdown(), listener.socket.getsockname()[1]
    async with serving(FastAPI(), listener, shutdown), httpx.AsyncClient() as client, asyncio.timeout(60):
        while True:
            try:
                assert (await client.get(f"http://127.0.0.1:{port}/")).status_code == 404
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.01)
    assert not shutdown.drain.is_set()


@asynccontextmanager
async def draining(
    listener: HttpListener, app: FastAPI | None = None
) -> AsyncIterator[tuple[Shutdown, Health, "asyncio.Task[None]"]]:
    """Serve with an hour for proxies, and an idle engine, until the signals of the block end it."""
    pool, shutdown = EnginePool([Managed()]), Shutdown()
    health = Health(engines=pool, dependencies={}, metrics=Metrics("m", "1", 10, pool))
    shutdown.install()
    shutdown.started()
    app = app or FastAPI()
    served = asyncio.create_task(
        serve_until_stopped(app, listener, health, pool, shutdown, grace_s=3600.0, drain_s=3600.0)
    )
    try:
        yield shutdown, health, served
    finally:
        for number in SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)


async def signalled(number: int, event: asyncio.Event) -> None:
    """Send a signal to this process, and wait for what it sets."""
    os.kill(os.getpid(), number)
    async with asyncio.timeout(60):
        await event.wait()


async def test_sigterm_leaves_time_to_proxies_and_a_second_signal_ends_it(listener: HttpListener) -> None:
    async with draining(listener) as (shutdown, health, served):
        await signalled(signal.SIGTERM, shutdown.drain)
        await asyncio.sleep(0.05)
        assert health.draining and not health.refusing and not served.done()
        await signalled(signal.SIGTERM, shutdown.abort)
        async with asyncio.timeout(60):
            await served
        assert health.refusing


async def test_behind_a_terminal_there_is_no_proxy_to_wait_for(listener: HttpListener) -> None:
    async with draining(listener) as (shutdown, health, served):
        await signalled(signal.SIGINT, shutdown.drain)
        async with asyncio.timeout(60):
            await served
        assert health.draining and health.refusing and not shutdown.abort.is_set()


async def test_a_stream_that_ends_late_after_the_drain_is_delivered_to_its_end(
    listener: HttpListener,
) -> None:
    """As on a machine with a slow disk, where the usage of an ended stream takes seconds to be durable."""
    app, over = FastAPI(), asyncio.Event()

    async def events() -> AsyncIterator[bytes]:
        yield b"first "
        await over.wait()
        await asyncio.sleep(AdmissionConfig().journal_s - 1)
        yield b"last"

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(events())

    url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}/stream"
    async with (
        draining(listener, app) as (_, health, served),
        httpx.AsyncClient() as client,
        client.stream("GET", url) as response,
    ):
        parts = response.aiter_text()
        assert await anext(parts) == "first "
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(60):
            while not health.refusing:
                await asyncio.sleep(0.01)
        over.set()
        assert "".join([part async for part in parts]) == "last"
        async with asyncio.timeout(60):
            await served
