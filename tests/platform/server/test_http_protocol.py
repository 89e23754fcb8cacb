"""Endless request heads against a real uvicorn: too large and too slow ones are closed before authentication."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from loraplex.platform.server import http_protocol
from loraplex.platform.server.http_protocol import MAX_HEAD_BYTES, BoundedHttpProtocol

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
CHUNKED = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
HEAD = b"POST /echo HTTP/1.1\r\nHost: x\r\n"


async def echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


@pytest.fixture
async def port() -> AsyncIterator[int]:
    app = Starlette(routes=[Route("/echo", echo, methods=["POST"])])
    config = uvicorn.Config(app, port=0, http=BoundedHttpProtocol, lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = server.force_exit = True
    await task


async def ended_by_server(port: int, start: bytes, part: bytes, most: int) -> bytes:
    """Send `start` and up to `most` bytes of `part`s, which the server must not all read, and return its response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(start)
    answer = asyncio.create_task(reader.read())
    sent = 0
    try:
        while sent < most and not answer.done():
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
            sent += len(part)
    except ConnectionError:
        return b""
    finally:
        writer.close()
    assert answer.done(), f"{sent} bytes were taken"
    return answer.result() if answer.exception() is None else b""


@pytest.mark.parametrize(
    ("start", "part"),
    [
        pytest.param(HEAD, b"X-A: " + b"a" * 1000 + b"\r\n", id="many headers"),
        pytest.param(HEAD + b"X-A: ", b"a" * 4096, id="one long header"),
        pytest.param(HEAD, b"a" * 4096, id="one long name"),
        pytest.param(b"POST /", b"a" * 4096, id="a long address"),
        pytest.param(HEAD, b"A: b\r\n", id="small headers"),
        pytest.param(CHUNKED + b"0\r\nX-A: ", b"a" * 4096, id="a long trailer"),
        pytest.param(CHUNKED + b"0\r\n", b"A: b\r\n", id="many trailers"),
        pytest.param(CHUNKED + b"1;", b"a" * 4096, id="a long chunk extension"),
    ],
)
async def test_a_head_without_end_is_refused(port: int, start: bytes, part: bytes) -> None:
    answer = await ended_by_server(port, start, part, most=32 * MAX_HEAD_BYTES)
    assert answer.startswith(b"HTTP/1.1 400") or not answer


async def test_large_bodies_and_pipelined_requests_pass(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    size = 4 * MAX_HEAD_BYTES
    for _ in range(2):
        writer.write(HEAD + b"Content-Length: %d\r\nX-A: %s\r\n\r\n" % (size, b"a" * (MAX_HEAD_BYTES // 2)))
        writer.write(b"b" * size)
    for _ in range(2):
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(len(str(size))) == str(size).encode()
    writer.close()


async def test_a_slow_head_is_ended_and_a_slow_body_is_not(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.2)
    silent, begun, body = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    begun[1].write(HEAD)
    body[1].write(HEAD + b"Content-Length: 2\r\n\r\na")
    assert await asyncio.wait_for(silent[0].read(), 5) == b""
    assert await asyncio.wait_for(begun[0].read(), 5) == b""
    body[1].write(b"b")
    assert (await asyncio.wait_for(body[0].readline(), 5)).startswith(b"HTTP/1.1 200")
    for _, writer in (silent, begun, body):
        writer.close()
