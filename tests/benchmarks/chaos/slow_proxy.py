"""A proxy of one unix socket that delays what it passes on, or lets connections hang as if a network had lost their peer.

Invariant: without a fault it changes nothing; an end on one side is passed on to the other.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

CHUNK_BYTES: Final = 64 << 10


class SlowProxy:
    """Passes connections at `path` on to `upstream`. `delay_s` is what each piece of data waits for, in each direction."""

    def __init__(self, path: Path, upstream: Path) -> None:
        self.path = path
        self.delay_s = 0.0
        self._upstream = upstream
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()

    async def __aenter__(self) -> Self:
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._connected, self.path)
        self.path.chmod(0o700)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        while self._links:
            for link in self._links:
                link.end()
            await asyncio.sleep(0)

    @property
    def connections(self) -> int:
        """Connections that are open, those that hang included."""
        return len(self._links)

    def hang_open_connections(self) -> None:
        """Let every open connection hang for ever: nothing is passed on, and neither side learns of it. New ones work."""
        for link in self._links:
            link.hangs.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await asyncio.open_unix_connection(self._upstream)
        except OSError:
            writer.transport.abort()
            return
        link = _Link(self, (reader, writer), upstream)
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)


class _Link:
    """One connection and the one behind it."""

    def __init__(
        self,
        proxy: SlowProxy,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.hangs = asyncio.Event()
        self._proxy = proxy
        self._writers = client[1], upstream[1]
        self._pumps = (
            asyncio.create_task(self._pump(client[0], upstream[1])),
            asyncio.create_task(self._pump(upstream[0], client[1])),
        )

    async def run(self) -> None:
        """Pass data on until one side ends, then end both."""
        await asyncio.wait(self._pumps, return_when=asyncio.FIRST_COMPLETED)
        self.end()

    def end(self) -> None:
        """End both connections at once."""
        for pump in self._pumps:
            pump.cancel()
        for writer in self._writers:
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                if self._proxy.delay_s:
                    await asyncio.sleep(self._proxy.delay_s)
                if self.hangs.is_set():
                    await asyncio.get_running_loop().create_future()
                writer.write(data)
                await writer.drain()
