"""Attacks on the HTTP side of a gateway: large bodies of one key, drips after an early answer, idle connections, unread answers.

Invariant: every attack has one signature and reconnects until its time is over, so that a control may aim it at a stub server.
"""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from urllib.parse import urlsplit

BODY_BYTES: Final = 10 << 20
CHUNK: Final = b"a" * 65_536
BODY_START: Final = b'{"model": "base", "messages": [{"role": "user", "content": "'
DRIP_S: Final = 1.0
RECONNECT_S: Final = 0.02
UNREAD_ANSWERS: Final = 50
RECEIVE_BUFFER_BYTES: Final = 4096
ATTACKER_ADDRESS: Final = "127.0.0.2"
"""Bounds per address are the attacker's own: other clients of the server come from 127.0.0.1."""


@dataclass(slots=True)
class AttackResult:
    """What became of the connections: their answers by status, and the seconds of those that the server ended."""

    opened: int = 0
    refused: int = 0
    sent_bytes: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    lifetimes_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    result: AttackResult

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()
        self.result.sent_bytes += len(data)

    async def read_status(self) -> None:
        line = await self.reader.readline()
        if line:
            status = int(line.split()[1])
            self.result.statuses[status] = self.result.statuses.get(status, 0) + 1


Attack: TypeAlias = Callable[[str, str, float, int], Awaitable[AttackResult]]
"""(base address, key, seconds, connections at once) -> what became of them."""


async def flood_bodies(base_url: str, key: str, duration_s: float, connections: int) -> AttackResult:
    """Send bodies of `BODY_BYTES` with one key, all but the last byte, and wait for the server to give up on them."""
    head = _head("POST /v1/chat/completions", f"Authorization: Bearer {key}", f"Content-Length: {BODY_BYTES}")

    async def once(connection: _Connection) -> None:
        answered = asyncio.create_task(connection.read_status())
        try:
            await connection.send(head + BODY_START)
            left = BODY_BYTES - len(BODY_START) - 1
            while left and not answered.done():
                await connection.send(CHUNK[:left])
                left -= min(left, len(CHUNK))
            await answered
        finally:
            answered.cancel()
            await asyncio.gather(answered, return_exceptions=True)

    return await _repeat(base_url, duration_s, connections, once)


async def drip_after_answer(base_url: str, key: str, duration_s: float, connections: int) -> AttackResult:
    """Be refused for a mistyped key, and go on sending the body, a byte per `DRIP_S`."""
    head = _head(
        "POST /v1/chat/completions", f"Authorization: Bearer {key}x", f"Content-Length: {BODY_BYTES}"
    )

    async def once(connection: _Connection) -> None:
        await connection.send(head)
        await connection.read_status()
        while not connection.writer.is_closing():
            await connection.send(b"a")
            await asyncio.sleep(DRIP_S)

    return await _repeat(base_url, duration_s, connections, once)


async def flood_connections(base_url: str, key: str, duration_s: float, connections: int) -> AttackResult:
    """Open connections and send nothing until the server ends them. `key` is unused."""

    async def once(connection: _Connection) -> None:
        await connection.read_status()
        await connection.reader.read()

    return await _repeat(base_url, duration_s, connections, once)


async def ignore_answers(base_url: str, key: str, duration_s: float, connections: int) -> AttackResult:
    """Request large documents and read none of them. `key` is unused."""
    requests = _head("GET /openapi.json") * UNREAD_ANSWERS

    async def once(connection: _Connection) -> None:
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        receiver = connection.writer.get_extra_info("socket")
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        await connection.send(requests)
        while not connection.writer.is_closing():
            await asyncio.sleep(DRIP_S)
            # Only a write reveals that the server has reset the connection.
            await connection.send(b"\r\n")

    return await _repeat(base_url, duration_s, connections, once)


ATTACKS: Final[Mapping[str, Attack]] = {
    "large bodies": flood_bodies,
    "drips after the answer": drip_after_answer,
    "idle connections": flood_connections,
    "unread answers": ignore_answers,
}


async def _repeat(
    base_url: str, duration_s: float, connections: int, once: Callable[[_Connection], Awaitable[None]]
) -> AttackResult:
    """Run `once` on new connections, `connections` at a time, for `duration_s`."""
    address, result = urlsplit(base_url), AttackResult()

    async def again_and_again() -> None:
        while True:
            began = time.monotonic()
            try:
                reader, writer = await asyncio.open_connection(
                    address.hostname, address.port, local_addr=(ATTACKER_ADDRESS, 0)
                )
            except OSError:
                result.refused += 1
            else:
                result.opened += 1
                try:
                    await once(_Connection(reader, writer, result))
                except ConnectionError:
                    pass
                finally:
                    writer.transport.abort()
                result.lifetimes_s.append(time.monotonic() - began)
            await asyncio.sleep(RECONNECT_S)

    try:
        async with asyncio.timeout(duration_s), asyncio.TaskGroup() as group:
            for _ in range(connections):
                group.create_task(again_and_again())
    except TimeoutError:
        return result
    raise AssertionError("attackers end only by their time")


def _head(request: str, *headers: str) -> bytes:
    lines = (f"{request} HTTP/1.1", "Host: gateway", "Content-Type: application/json", *headers)
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"
