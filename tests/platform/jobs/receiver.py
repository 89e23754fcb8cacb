"""A receiver of webhooks on a real port, and a resolver that leads to it."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias

LOCAL: Final = "127.0.0.1"
OK: Final = b"HTTP/1.1 204 No Content\r\n\r\n"
Answer: TypeAlias = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class FakeResolver:
    """Answers with the next list of addresses; the last one stays."""

    answers: list[Sequence[str]]
    asked: list[tuple[str, int]] = field(default_factory=list)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@dataclass
class Receiver:
    """A server on a real port that records the requests."""

    port: int = 0
    requests: list[bytes] = field(default_factory=list)


def fixed(content: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(content)

    return answer


@asynccontextmanager
async def receiving(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    receiver = Receiver()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        receiver.requests.append(head + await reader.readexactly(length))
        try:
            await answer(writer)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, LOCAL, 0, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
