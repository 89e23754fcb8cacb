"""The proxy changes nothing without a fault, delays what it passes on, and lets connections hang."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.benchmarks.chaos.slow_proxy import SlowProxy

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
DELAY_S = 0.2


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data)
    writer.close()


@asynccontextmanager
async def proxied(tmp_path: Path) -> AsyncIterator[SlowProxy]:
    upstream = tmp_path / "up.sock"
    server = await asyncio.start_unix_server(echo, upstream)
    async with SlowProxy(tmp_path / "proxy.sock", upstream) as proxy:
        yield proxy
    server.close()


async def exchanged(connection: Connection) -> tuple[bytes, float]:
    """What came back, and after how many seconds."""
    reader, writer = connection
    began = time.monotonic()
    writer.write(b"hello")
    return await reader.read(100), time.monotonic() - began


async def test_it_delays_both_directions(tmp_path: Path) -> None:
    async with proxied(tmp_path) as proxy:
        connection = await asyncio.open_unix_connection(proxy.path)
        assert (await exchanged(connection))[0] == b"hello"
        proxy.delay_s = DELAY_S
        answer, seconds = await exchanged(connection)
        assert (answer, seconds >= 2 * DELAY_S) == (b"hello", True)


async def test_open_connections_hang_and_new_ones_work(tmp_path: Path) -> None:
    async with proxied(tmp_path) as proxy:
        hanging = await asyncio.open_unix_connection(proxy.path)
        await exchanged(hanging)
        proxy.hang_open_connections()
        fresh = await asyncio.open_unix_connection(proxy.path)
        waiting = asyncio.create_task(exchanged(hanging))
        assert (await exchanged(fresh))[0] == b"hello"
        assert not waiting.done() and proxy.connections == 2
        waiting.cancel()


async def test_an_end_is_passed_on(tmp_path: Path) -> None:
    async with proxied(tmp_path) as proxy:
        reader, writer = await asyncio.open_unix_connection(proxy.path)
        await exchanged((reader, writer))
        writer.write_eof()
        assert await reader.read() == b""
        (tmp_path / "up.sock").unlink()
        reader, _ = await asyncio.open_unix_connection(proxy.path)
        assert await reader.read() == b"", "no one listens behind the proxy"
