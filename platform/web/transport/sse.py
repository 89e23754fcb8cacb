"""Server-sent events over ASGI (WHATWG HTML, 9.2): one `data:` line per event, the last one `[DONE]` unless it failed.

Invariant: the generation is closed however the stream ends: completely, with an error, or because the client left. Unless the
client left, its usage is in the journal before the last byte is sent.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, Protocol

import msgspec
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loraplex.engine.messages import Delta, Finished, Scored
from loraplex.platform.errors import ClientError, ClientGone, describe
from loraplex.platform.inference.generation import Generation
from loraplex.platform.observability.request_record import request_record_of
from loraplex.platform.web.transport.client_presence import unless_disconnected

DONE: Final = b"data: [DONE]\n\n"
LOG: Final = structlog.get_logger("loraplex.streaming")


class ChunkEncoder(Protocol):
    """Encodes one streamed response. Every method returns whole SSE events, or nothing to send."""

    def opening(self) -> bytes: ...

    def scored(self, choice: int, event: Scored) -> bytes: ...

    def delta(self, choice: int, event: Delta) -> bytes: ...

    async def finished(self, choice: int, event: Finished) -> bytes: ...

    def closing(self) -> bytes: ...


def error_event(error: ClientError) -> bytes:
    """Encode an SSE event named `error` with the OpenAI error object."""
    return b"event: error\ndata: " + msgspec.json.encode(error.body()) + b"\n\n"


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with self._generation.delivering():
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
        await self._send(send, encoder.closing() + DONE)
        await self._send(send, b"", more=False)

    async def _fail(self, error: Exception, scope: Scope, send: Send) -> None:
        client_error = describe(error)
        request_record_of(scope).error_code = client_error.row.code
        if client_error.row.is_logged:
            LOG.error("stream failed", code=client_error.row.code, exc_info=error)
        await self._send(send, error_event(client_error))
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            raise ClientGone(f"The client took nothing for {self._stall_s:g} s.") from None
