"""A server that reads requests, refuses large ones, and answers without work: `python -m tests.benchmarks.stub_server`.

Invariant: it prints its address once it listens and ends with its standard input.
"""

import asyncio
import re
import sys
from contextlib import suppress

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
REFUSAL = b"HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
MAX_BODY_BYTES = 1 << 20
MAX_HEAD_BYTES = 1 << 16
PIECE_BYTES = 1 << 16


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection until the client closes it."""
    with suppress(OSError, EOFError):
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            if length and int(length[1]) > MAX_BODY_BYTES:
                writer.write(REFUSAL)
                break
            await _discard(reader, int(length[1]) if length else 0)
            writer.write(ANSWER)
            await writer.drain()
    writer.close()


async def _discard(reader: asyncio.StreamReader, count: int) -> None:
    while count > 0:
        piece = await reader.read(min(count, PIECE_BYTES))
        if not piece:
            raise EOFError("the client left in the middle of a body")
        count -= len(piece)


async def main() -> None:
    """Serve on a free port of this machine until standard input ends."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=MAX_HEAD_BYTES)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
