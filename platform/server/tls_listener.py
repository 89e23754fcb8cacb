"""Accepts connections that begin with a handshake of TLS.

Invariant: a connection is counted before its handshake begins and has `HANDSHAKE_S` for it, so clients that never finish one
take no more places than others.
"""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Final

from loraplex.platform.engines.event_buffer import READER_STALL_S
from loraplex.platform.server.certificate import ServerCertificate
from loraplex.platform.server.connection_limiter import ConnectionLimiter, Place

HANDSHAKE_S: Final = 10.0
RETRY_S: Final = 0.1
"""Pause where the system has no descriptor for another connection."""


class TlsListener:
    """Gives each connection of a bound socket, as soon as its handshake is over, to a `protocol` with its place.

    A connection that the server closes has `READER_STALL_S` to take what is left of its answer.
    """

    def __init__(
        self,
        listener: socket.socket,
        certificate: ServerCertificate,
        limiter: ConnectionLimiter,
        protocol: Callable[[Place], asyncio.Protocol],
    ) -> None:
        self._socket = listener
        self._certificate = certificate
        self._limiter = limiter
        self._protocol = protocol
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, backlog: int) -> None:
        """Listen, and accept on the running loop until `close`."""
        self._socket.setblocking(False)
        self._socket.listen(backlog)
        self._keep(asyncio.create_task(self._accept()))

    def close(self) -> None:
        """Accept nothing more, and end handshakes. The socket stays the caller's."""
        for task in tuple(self._tasks):
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until `close` has ended all."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._socket)
            except OSError:
                await asyncio.sleep(RETRY_S)
                continue
            self._begin(connection, address[0])

    def _begin(self, connection: socket.socket, address: str) -> None:
        def evict() -> None:
            task.cancel()

        place = self._limiter.acquire(address, evict)
        if place is None:
            connection.close()
            return
        task = asyncio.create_task(self._shake_hands(connection, place))
        self._keep(task)

    async def _shake_hands(self, connection: socket.socket, place: Place) -> None:
        try:
            # Tokens are small: none waits for the acknowledgement of the one before.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                partial(self._protocol, place),
                connection,
                ssl=self._certificate.context,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=READER_STALL_S,
            )
        except OSError:
            # No TLS, another version, or a client that left: nothing can be said to it.
            connection.close()
            self._limiter.release(place)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
