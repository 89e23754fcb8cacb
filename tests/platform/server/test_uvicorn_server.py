"""A second listener of the process, such as that of the metrics: its failure is not left unnoticed."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from loraplex.platform.server.connection_limiter import ConnectionLimiter
from loraplex.platform.server.listening import bind
from loraplex.platform.server.process_signals import Shutdown
from loraplex.platform.server.uvicorn_server import HttpListener, Server, serving


@pytest.fixture
def listener() -> Iterator[HttpListener]:
    with bind("127.0.0.1", 0) as bound:
        yield HttpListener(bound, ConnectionLimiter(10, 10), stall_s=60.0)


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
