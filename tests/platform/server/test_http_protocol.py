"""Bounds of connections against a real uvicorn: heads without end, bodies after the answer, answers that are not read."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from loraplex.platform.errors import ClientGone
from loraplex.platform.server import http_protocol
from loraplex.platform.server.connection_limiter import ConnectionLimiter
from loraplex.platform.server.http_protocol import (
    LINGER_BYTES,
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    BoundedHttpProtocol,
)
from loraplex.platform.web.transport.client_presence import UnlessDisconnected

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
StartServer = Callable[..., Awaitable["Served"]]
CHUNKED = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
SLOW = CHUNKED.replace(b"/echo", b"/slow")
HEAD = b"POST /echo HTTP/1.1\r\nHost: x\r\n"
REFUSED_HEAD = b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
LARGE = 16 << 20
CHUNK, CHUNKS = 1 << 20, 24


async def refuse(request: Request) -> PlainTextResponse:
    return PlainTextResponse("no", 401)


async def large(request: Request) -> PlainTextResponse:
    return PlainTextResponse("a" * LARGE)


class SlowAnswer:
    """An answer that is sent before the request's body is read, and ends when `end` is set."""

    def __init__(self) -> None:
        self.begun, self.end = asyncio.Event(), asyncio.Event()

    async def __call__(self, request: Request) -> StreamingResponse:
        return StreamingResponse(self._parts(), 401)

    async def _parts(self) -> AsyncIterator[bytes]:
        yield b"n"
        self.begun.set()
        await self.end.wait()
        yield b"o"


class UnreadBody:
    """A handler that waits for `go` before it reads the body."""

    def __init__(self) -> None:
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def __call__(self, request: Request) -> PlainTextResponse:
        self.begun.set()
        await self.go.wait()
        return PlainTextResponse(str(len(await request.body())))


async def in_chunks(request: Request) -> StreamingResponse:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(CHUNKS):
            yield b"a" * CHUNK

    return StreamingResponse(parts())


class Served:
    """A server with the protocol; its connections can be counted."""

    def __init__(self, limiter: ConnectionLimiter, stall_s: float) -> None:
        self.draining = False
        self.slow_answer, self.unread_body = SlowAnswer(), UnreadBody()
        self.echoed = 0
        self.watching, self.left, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        routes = [
            Route("/echo", self._echo, methods=["POST"]),
            Route("/slow", self.slow_answer.__call__, methods=["POST"]),
            Route("/unread", self.unread_body.__call__, methods=["POST"]),
            Route("/chunks", in_chunks),
            Route("/refuse", refuse, methods=["POST"]),
            Route("/large", large),
            Route("/watching", self._watch, methods=["POST"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes),
            port=0,
            http=partial(  # type: ignore[arg-type]
                BoundedHttpProtocol, limiter=limiter, stall_s=stall_s, is_draining=lambda: self.draining
            ),
            lifespan="off",
            log_level="critical",
        )
        self.limiter = limiter
        self._server = uvicorn.Server(config)
        self._task = asyncio.create_task(self._server.serve())

    async def _echo(self, request: Request) -> PlainTextResponse:
        self.echoed += 1
        return PlainTextResponse(str(len(await request.body())))

    async def _watch(self, request: Request) -> PlainTextResponse:
        """Read the body, wait for the client's leaving or `ended`, and say that no task waits for a message."""
        await request.body()
        before = asyncio.all_tasks()
        try:
            async with UnlessDisconnected(request.scope, request.receive):
                self.watching.set()
                assert asyncio.all_tasks() == before
                await self.ended.wait()
        except ClientGone:
            self.left.set()
        return PlainTextResponse("ended")

    @property
    def protocols(self) -> list[Any]:
        """The open connections of the server."""
        return list(self._server.server_state.connections)

    async def started(self) -> "Served":
        while not self._server.started:
            await asyncio.sleep(0.005)
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._task

    async def connect(self, address: str = "127.0.0.1") -> Connection:
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))

    async def until_closed(self) -> None:
        """Wait until the server has no connection."""
        async with asyncio.timeout(60):
            while self.limiter.open_connections:
                await asyncio.sleep(0.01)


@pytest.fixture
async def start_server() -> AsyncIterator[StartServer]:
    async with AsyncExitStack() as stack:

        async def start(limiter: ConnectionLimiter | None = None, stall_s: float = 60.0) -> Served:
            served = await Served(limiter or ConnectionLimiter(100, 100), stall_s).started()
            stack.push_async_callback(served.stop)
            return served

        yield start


@pytest.fixture
async def port(start_server: StartServer) -> int:
    return (await start_server()).port


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
        await asyncio.gather(answer, return_exceptions=True)
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


async def test_a_client_that_leaves_ends_the_work_on_its_request(start_server: StartServer) -> None:
    served = await start_server()
    _, writer = await served.connect()
    writer.write(b"POST /watching HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\na")
    async with asyncio.timeout(60):
        await served.watching.wait()
        writer.close()
        await served.left.wait()


async def test_a_connection_serves_on_after_a_watched_request(start_server: StartServer) -> None:
    served = await start_server()
    reader, writer = await served.connect()
    served.ended.set()
    for _ in range(2):
        writer.write(b"POST /watching HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\na")
        async with asyncio.timeout(60):
            assert (await reader.readuntil(b"ended")).startswith(b"HTTP/1.1 200")
    assert not served.left.is_set()
    writer.close()
    await served.until_closed()
    assert not served.left.is_set()


async def test_while_draining_each_answer_ends_its_connection(start_server: StartServer) -> None:
    served = await start_server()
    reader, writer = await served.connect()
    request = HEAD + b"Content-Length: 1\r\n\r\na"
    writer.write(request)
    before = await reader.readuntil(b"\r\n\r\n1")
    assert before.startswith(b"HTTP/1.1 200") and b"connection: close" not in before
    served.draining = True
    writer.write(request)
    async with asyncio.timeout(60):
        after = await reader.read()
    assert after.startswith(b"HTTP/1.1 200") and b"connection: close\r\n" in after
    assert served.echoed == 2
    writer.close()


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


async def test_a_pipeline_of_many_requests_ends_the_connection(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n" * 5000)
    async with asyncio.timeout(60):
        answers = await reader.read()
    writer.close()
    assert answers.count(b"HTTP/1.1 404") <= MAX_PIPELINED


async def test_a_slow_head_is_ended_and_a_slow_body_is_not(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.5)
    silent, begun, body = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    begun[1].write(HEAD)
    body[1].write(HEAD + b"Content-Length: 2\r\n\r\na")
    assert await asyncio.wait_for(silent[0].read(), 60) == b""
    assert await asyncio.wait_for(begun[0].read(), 60) == b""
    body[1].write(b"b")
    assert (await asyncio.wait_for(body[0].readline(), 60)).startswith(b"HTTP/1.1 200")
    for _, writer in (silent, begun, body):
        writer.close()


async def test_empty_lines_do_not_keep_an_idle_connection(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await start_server()
    reader, writer = await served.connect()
    writer.write(HEAD + b"Content-Length: 0\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n0")
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.2)
    dripping = asyncio.create_task(drip(writer, b"\r\n"))
    await served.until_closed()
    dripping.cancel()


async def drip(writer: asyncio.StreamWriter, part: bytes) -> None:
    """Send `part` again and again, also when the server has closed."""
    while True:
        writer.write(part)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("part", [b"a", b"a" * 65_536], ids=["drip", "flood"])
async def test_a_body_after_the_answer_ends_with_the_connection(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, part: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.3)
    served = await start_server()
    reader, writer = await served.connect()
    writer.write(REFUSED_HEAD % (1 << 30) + b"a")
    dripping = asyncio.create_task(drip(writer, part))
    answer = await reader.readuntil(b"\r\n\r\nno")
    assert answer.startswith(b"HTTP/1.1 401") and b"connection: close" in answer
    await served.until_closed()
    dripping.cancel()


async def test_a_client_that_sends_its_whole_body_first_still_reads_the_early_answer(
    start_server: StartServer,
) -> None:
    served = await start_server()
    reader, writer = await served.connect()
    size = LINGER_BYTES
    writer.write(REFUSED_HEAD % size)
    for _ in range(size // 1024):
        writer.write(b"a" * 1024)
        await writer.drain()
    async with asyncio.timeout(60):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 401") and answer.endswith(b"no")
    writer.close()
    await served.until_closed()


async def test_an_answer_after_the_whole_body_keeps_the_connection(start_server: StartServer) -> None:
    served = await start_server()
    reader, writer = await served.connect()
    for _ in range(3):
        writer.write(REFUSED_HEAD % 2 + b"ab")
        answer = await reader.readuntil(b"\r\n\r\nno")
        assert b"connection: close" not in answer
    writer.close()


async def test_a_body_is_not_read_before_the_application_asks_for_it(start_server: StartServer) -> None:
    served = await start_server()
    reader, writer = await served.connect()
    size = 1 << 20
    writer.write(b"POST /unread HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
    await served.unread_body.begun.wait()
    writer.write(b"a" * size)
    await asyncio.sleep(0.1)
    assert [len(protocol.cycle.body) for protocol in served.protocols] == [0]
    served.unread_body.go.set()
    async with asyncio.timeout(60):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(len(str(size))) == str(size).encode()
    writer.close()


async def test_a_request_behind_an_early_answer_does_not_run(start_server: StartServer) -> None:
    served = await start_server()
    reader, writer = await served.connect()
    # Chunked: no length of the rest is known, so the answer ends the connection.
    writer.write(SLOW + b"1\r\na\r\n")
    await served.slow_answer.begun.wait()
    writer.write(b"0\r\n\r\n" + HEAD + b"Content-Length: 0\r\n\r\n")
    await until_parsed(served)
    served.slow_answer.end.set()
    async with asyncio.timeout(60):
        answer = await reader.read()
    assert answer.count(b"HTTP/1.1") == 1 and b"connection: close" in answer and served.echoed == 0
    writer.close()
    await served.until_closed()


async def until_parsed(served: Served) -> None:
    """Wait until the head behind the answer in progress is parsed."""
    async with asyncio.timeout(60):
        while not served.protocols[0].pipeline:
            await asyncio.sleep(0.01)


async def test_an_early_answer_that_waits_for_its_client_lingers(start_server: StartServer) -> None:
    served = await start_server()
    served.slow_answer.end.set()
    reader, writer = await served.connect()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n" + SLOW)
    async with asyncio.timeout(60):
        while not any(protocol.cycle and protocol.cycle.more_body for protocol in served.protocols):
            await asyncio.sleep(0.01)
    writer.write(b"0\r\n\r\n" + HEAD + b"Content-Length: 0\r\n\r\n")
    await until_parsed(served)
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    async with asyncio.timeout(60):
        answers = await reader.read()
    assert answers.count(b"HTTP/1.1") == 2 and answers.endswith(b"0\r\n\r\n") and served.echoed == 0
    assert served.protocols, "what the client still sends would reset the connection"
    writer.close()
    await served.until_closed()


def unread(connection: Connection) -> None:
    """Let the client's end take little more."""
    writer = connection[1]
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)


@pytest.mark.parametrize("header", [b"", b"Connection: close\r\n"], ids=["keep-alive", "close"])
async def test_a_client_that_reads_nothing_loses_its_connection(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, header: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "MIN_READ_BYTES_PER_S", LARGE * 10)
    served = await start_server(stall_s=0.2)
    connection = await served.connect()
    unread(connection)
    connection[1].write(b"GET /large HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n")
    await served.until_closed()
    connection[1].close()


async def test_a_client_that_keeps_reading_gets_its_answer(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer takes longer than the bound on one stall, which begins again with each chunk."""
    monkeypatch.setattr(http_protocol, "MIN_READ_BYTES_PER_S", CHUNK * 1000)
    served = await start_server(stall_s=1.0)
    reader, writer = await served.connect()
    writer.write(b"GET /chunks HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    async with asyncio.timeout(60):
        for _ in range(CHUNKS):
            await reader.readuntil(b"\r\n")
            await reader.readexactly(CHUNK + 2)
            await asyncio.sleep(0.05)
    writer.close()


async def test_a_connection_over_a_bound_gets_503_and_ends(start_server: StartServer) -> None:
    refused: list[str] = []
    limiter = ConnectionLimiter(4, 2, on_refused=lambda bound, address: refused.append(bound))
    served = await start_server(limiter)
    open_ones = [await served.connect() for _ in range(2)]
    await served_by(open_ones[-1])
    assert (await over_bound(await served.connect())).startswith(b"HTTP/1.1 503")
    open_ones.append(await served.connect("127.0.0.2"))
    await served_by(open_ones[-1])
    assert (await over_bound(await served.connect("127.0.0.2"))).startswith(b"HTTP/1.1 503")
    assert refused == ["address", "total"]
    open_ones[0][1].close()
    async with asyncio.timeout(60):
        while served.limiter.open_connections == 3:
            await asyncio.sleep(0.01)
    await served_by(await served.connect())


async def test_silent_connections_give_way_and_served_ones_do_not(start_server: StartServer) -> None:
    served = await start_server(ConnectionLimiter(4, 4))
    in_progress = await served.connect()
    in_progress[1].write(b"POST /unread HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n")
    await served.unread_body.begun.wait()
    silent = await served.connect()
    open_ones = []
    for number in (2, 3, 4):
        open_ones.append(await served.connect(f"127.0.0.{number}"))
        await served_by(open_ones[-1])
    assert await over_bound(silent) == b""
    assert (await over_bound(await served.connect("127.0.0.5"))).startswith(b"HTTP/1.1 503")
    served.unread_body.go.set()
    in_progress[1].write(b"a")
    assert (await in_progress[0].readline()).startswith(b"HTTP/1.1 200")


async def served_by(connection: Connection) -> None:
    connection[1].write(HEAD + b"Content-Length: 0\r\n\r\n")
    assert (await connection[0].readline()).startswith(b"HTTP/1.1 200")


async def over_bound(connection: Connection) -> bytes:
    async with asyncio.timeout(60):
        answer = await connection[0].read()
    connection[1].close()
    return answer
