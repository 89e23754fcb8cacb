"""Server-sent events over ASGI (WHATWG HTML, 9.2). An encoder writes the events of its dialect, the last and the failed one too.

Invariant: the generation is closed however the stream ends: completely, with an error, or because the client left. Unless the
client left, its usage is in the journal before the last byte is sent.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final, Protocol

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loraplex.engine.messages import Delta, Finished, Scored
from loraplex.platform.errors import ClientError, ClientGone, describe
from loraplex.platform.inference.generation import Generation
from loraplex.platform.observability.failed_requests import note_error
from loraplex.platform.observability.request_record import request_record_of
from loraplex.platform.web.transport.client_presence import unless_disconnected

PING_S: Final = 15.0
LOG: Final = structlog.get_logger("loraplex.streaming")


class ChunkEncoder(Protocol):
    """Encodes one streamed response. Every method returns whole SSE events, or nothing to send.

    `closing` ends a complete response, `failed` one that has failed. `ping`: what is sent after `PING_S` seconds of silence, if anything.
    """

    @property
    def ping(self) -> bytes: ...

    def opening(self) -> bytes: ...

    def scored(self, choice: int, event: Scored) -> bytes: ...

    def delta(self, choice: int, event: Delta) -> bytes: ...

    async def finished(self, choice: int, event: Finished) -> bytes: ...

    def closing(self) -> bytes: ...

    def failed(self, error: ClientError) -> bytes: ...


class EventStream(Response):
    """Sends a generation as it runs. A client that takes no data for `stall_s` seconds counts as gone: otherwise it would
    keep its place among the requests in flight for as long as it kept its connection.
    """

    media_type = "text/event-stream"

    def __init__(
        self, generation: Generation, encoder: ChunkEncoder, headers: Mapping[str, str], stall_s: float
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no", **headers})
        self._generation = generation
        self._encoder = encoder
        self._stall_s = stall_s
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with self._generation.delivering(), self._pinging(send):
                await unless_disconnected(scope, receive, self._pump(send))
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001 - every error is sent to the client, and the generation is closed
            try:
                await self._generation.close(error)
            finally:
                with suppress(ClientGone):
                    await self._fail(error, scope, send)
        finally:
            await self._generation.close()

    async def _pump(self, send: Send) -> None:
        encoder = self._encoder
        await self._send(send, encoder.opening())
        async for choice, event in self._generation.events():
            if isinstance(event, Delta):
                chunk = encoder.delta(choice, event)
            elif isinstance(event, Scored):
                chunk = encoder.scored(choice, event)
            else:
                chunk = await encoder.finished(choice, event)
            if chunk:
                await self._send(send, chunk)
        await self._generation.close()
        await self._send(send, encoder.closing())
        await self._send(send, b"", more=False)

    @asynccontextmanager
    async def _pinging(self, send: Send) -> AsyncIterator[None]:
        """Send the encoder's ping while a block sends nothing else."""
        if not self._encoder.ping:
            yield
            return
        pings = asyncio.create_task(self._ping(send))
        try:
            yield
        finally:
            pings.cancel()
            # A client that takes no ping takes no event either, which then says so.
            await asyncio.gather(pings, return_exceptions=True)

    async def _ping(self, send: Send) -> None:
        while True:
            left_s = self._sent_at + PING_S - time.monotonic()
            if left_s <= 0:
                await self._send(send, self._encoder.ping)
            else:
                await asyncio.sleep(left_s)

    async def _fail(self, error: Exception, scope: Scope, send: Send) -> None:
        client_error = describe(error)
        note_error(request_record_of(scope), error, client_error.row)
        if client_error.row.is_logged:
            LOG.error("stream failed", code=client_error.row.code, exc_info=error)
        await self._send(send, self._encoder.failed(client_error))
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await send({"type": "http.response.body", "body": body, "more_body": more})
            self._sent_at = time.monotonic()
        except TimeoutError:
            raise ClientGone(f"The client took nothing for {self._stall_s:g} s.") from None
