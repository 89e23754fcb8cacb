"""A proxy in front of PostgreSQL that refuses connections or falls silent, as a server or a network does that is lost."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from sqlalchemy import make_url

SOCKET = ".s.PGSQL.5432"
Loss = Literal["refused", "silent"]


class DatabaseProxy:
    """Forwards the connections of one socket. `url` is the address of the same database through it."""

    def __init__(self, url: str, folder: Path) -> None:
        address = make_url(url)
        self._server_socket = Path(str(address.query["host"])) / SOCKET
        self._socket = folder / SOCKET
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.url = address.update_query_dict({"host": str(folder)}).render_as_string(hide_password=False)
        self.connections = 0

    async def listen(self) -> None:
        self._server = await asyncio.start_unix_server(self._forward, self._socket)

    async def refuse(self) -> None:
        """Break all connections and accept no new one."""
        assert self._server is not None
        self._server.close()
        self._socket.unlink(missing_ok=True)
        for writer in self._writers:
            writer.transport.abort()
        self._server = None

    @asynccontextmanager
    async def lost(self, how: Loss) -> AsyncIterator[None]:
        """For the block, refuse connections, or keep them and answer nothing."""
        if how == "silent":
            with self.silent():
                yield
            return
        await self.refuse()
        try:
            yield
        finally:
            await self.listen()

    @contextmanager
    def silent(self) -> Iterator[None]:
        self._flows.clear()
        try:
            yield
        finally:
            self._flows.set()

    async def close(self) -> None:
        if self._server is not None:
            await self.refuse()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await self._flows.wait()
        upstream_reader, upstream = await asyncio.open_unix_connection(self._server_socket)
        both = {writer, upstream}
        self._writers |= both
        try:
            pumps = self._pump(reader, upstream), self._pump(upstream_reader, writer)
            await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            self._writers -= both
            for each in both:
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def proxied(url: str) -> AsyncIterator[DatabaseProxy]:
    """A proxy in front of the database at `url`, whose address has a socket's folder."""
    # Not in the folder of the test: the path of a socket is short.
    with TemporaryDirectory() as folder:
        proxy = DatabaseProxy(url, Path(folder))
        await proxy.listen()
        try:
            yield proxy
        finally:
            await proxy.close()
