"""An HTTP/1.1 client that costs little: whole requests encoded beforehand, kept connections, and no parser but a search.

Invariant: the load is open. A request is due at its time whatever became of earlier ones, and its latency counts from then.
"""

import asyncio
import re
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

HEAD_END: Final = b"\r\n\r\n"
LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
OK: Final = b"200"
NO_CONNECTION: Final = "no connection"
CUT_OFF: Final = "connection lost"


@dataclass(slots=True)
class OpenLoopResult:
    """Seconds from each request's time to the end of its response, and the responses that were no 200 by status.

    `late_s`: how late a request was sent at most, which is the client's fault.
    """

    latencies: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    late_s: float = 0.0


class OpenLoopClient:
    """Sends requests over at most `connections` connections to one server; a request waits while all are in use."""

    def __init__(self, host: str, port: int, connections: int) -> None:
        self._host = host
        self._port = port
        self._free_places = connections
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._waiting: deque[tuple[bytes, float]] = deque()
        self._loop = asyncio.get_running_loop()
        self._pending = 0
        self._opening: set[asyncio.Task[None]] = set()
        self._answered = asyncio.Event()
        self._result = OpenLoopResult()

    async def send_at(self, requests: Sequence[bytes], offsets: Sequence[float]) -> OpenLoopResult:
        """Send one of `requests` in turn at each offset, in seconds from now, and wait for every response."""
        result = self._result = OpenLoopResult()
        began = self._loop.time()
        for number, offset in enumerate(offsets):
            due = began + offset
            while (wait := due - self._loop.time()) > 0:
                await asyncio.sleep(wait)
            result.late_s = max(result.late_s, -wait)
            self._pending += 1
            self._send(requests[number % len(requests)], due)
        while self._pending:
            self._answered.clear()
            await self._answered.wait()
        return result

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._open):
            connection.close()

    def answered(self, connection: "_Connection", status: bytes, due: float) -> None:
        """Record a response, and give its connection the next request."""
        if status == OK:
            self._result.latencies.append(self._loop.time() - due)
        else:
            self._result.errors[status.decode(errors="replace")] += 1
        self._finish_one()
        if self._waiting:
            connection.send(*self._waiting.popleft())
        else:
            self._idle.append(connection)

    def lost(self, connection: "_Connection", *, in_use: bool) -> None:
        """Record that the server closed a connection."""
        self._open.discard(connection)
        self._free_places += 1
        if in_use:
            self._fail(CUT_OFF)
        elif connection in self._idle:
            self._idle.remove(connection)

    def _send(self, request: bytes, due: float) -> None:
        if self._idle:
            self._idle.pop().send(request, due)
        elif self._free_places:
            self._free_places -= 1
            task = self._loop.create_task(self._open_one(request, due))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        else:
            self._waiting.append((request, due))

    async def _open_one(self, request: bytes, due: float) -> None:
        try:
            _, connection = await self._loop.create_connection(
                lambda: _Connection(self), self._host, self._port
            )
        except OSError:
            self._free_places += 1
            self._fail(NO_CONNECTION)
            return
        self._open.add(connection)
        connection.send(request, due)

    def _fail(self, reason: str) -> None:
        self._result.errors[reason] += 1
        self._finish_one()

    def _finish_one(self) -> None:
        self._pending -= 1
        if not self._pending:
            self._answered.set()


class _Connection(asyncio.Protocol):
    """One kept connection with at most one request in progress."""

    def __init__(self, client: OpenLoopClient) -> None:
        self._client = client
        self._received = b""
        self._due: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of a TCP connection
        self._transport = transport

    def send(self, request: bytes, due: float) -> None:
        self._received, self._due = b"", due
        self._transport.write(request)

    def close(self) -> None:
        self._due = None
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        received = self._received = self._received + data if self._received else data
        end = received.find(HEAD_END)
        length = LENGTH.search(received, 0, end + 2) if end >= 0 else None
        if length is None or len(received) < end + len(HEAD_END) + int(length[1]) or self._due is None:
            return
        due, self._due = self._due, None
        self._client.answered(self, received[9:12], due)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.lost(self, in_use=self._due is not None)


def encode_request(path: str, key: str, body: bytes) -> bytes:
    """Encode a POST of a JSON body."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
