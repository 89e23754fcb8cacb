"""uvicorn's HTTP/1.1 protocol with bounds on connections, on the head of a request, and on an answer that is not read.

Invariant: until the application reads its body, a request costs at most `MAX_HEAD_BYTES` and one read (256 KiB). A head has
`HEAD_S` seconds. The parser alone would collect a head of any size (RFC 9112, 2.2 and 3 leave the limits to servers).
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from loraplex.platform.engines.event_buffer import READER_STALL_S
from loraplex.platform.server.connection_limiter import ConnectionLimiter, Place
from loraplex.platform.web.transport.client_presence import CONNECTION

MAX_HEAD_BYTES = 64 << 10
HEAD_S = 30.0
LINGER_S = 2.0
LINGER_BYTES = 256 << 10
MIN_READ_BYTES_PER_S = 64 << 10
MAX_PIPELINED: Final = 8
"""Requests of a connection that wait for the responses to earlier ones."""
CLOSE_HEADER: Final = (b"connection", b"close")
REFUSAL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


class HeadTooLarge(Exception):
    """Raised inside the parser, which responds 400 and closes the connection."""


class PipelineTooLong(Exception):
    """Raised inside the parser, which responds 400 and closes the connection."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections that `limiter` refuses, that answer their head too late, or whose client does not read.

    A client that takes none of an answer for `stall_s`, or a long one at less than `MIN_READ_BYTES_PER_S`, loses its
    connection. An answer before the end of its request's body ends the connection: for `LINGER_S` up to `LINGER_BYTES` are
    discarded, because a reset would take the answer from the client (RFC 9112, 9.6). While `is_draining`, every answer ends
    its connection, so that clients go elsewhere before the server closes them. `place`: the connection's, where it is counted
    already.
    """

    def __init__(
        self,
        *arguments: Any,
        limiter: ConnectionLimiter,
        is_draining: Callable[[], bool],
        place: Place | None = None,
        stall_s: float = READER_STALL_S,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._application: ASGIApp = self.app
        self.app = self._closing_when_due
        self._limiter = limiter
        self._stall_s = stall_s
        self._is_draining = is_draining
        self._place = place
        self._head_bytes = 0
        self._unparsed_bytes = 0
        self._parsed_something = False
        self._early_cycle: RequestResponseCycle | None = None
        self._lingering = False
        self._discarded_bytes = 0
        self._is_lost = False
        self._left: Callable[[], None] | None = None
        self._head_timer = _Timer(self.loop, self._head_is_late)
        self._linger_timer = _Timer(self.loop, self._end_linger)
        self._write_timer = _Timer(self.loop, self._end_stalled)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        if self._place is None:
            self._place = self._limiter.acquire(self.client[0] if self.client else "", self._evict)
        else:
            self._place.evict = self._evict
        if self._place is None:
            transport.write(REFUSAL)
            transport.close()
            return
        self._head_timer.start(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._place is not None:
            self._limiter.release(self._place)
            self._place = None
        for timer in (self._head_timer, self._linger_timer, self._write_timer):
            timer.stop()
        super().connection_lost(exc)
        self._is_lost = True
        if self._left is not None:
            self._left()

    def watch(self, left: Callable[[], None]) -> None:
        """See `Connection`: one request of a connection is in progress at a time. Reads on, which alone shows the loss."""
        self._left = left
        if self._is_lost:
            self.loop.call_soon(left)
        else:
            self.flow.resume_reading()

    def unwatch(self) -> None:
        """See `Connection`."""
        self._left = None

    def data_received(self, data: bytes) -> None:
        """Also bound a header, trailer or chunk extension that never ends: the parser reports it only at its end."""
        if self._lingering:
            self._discard(len(data))
            return
        if self.cycle is None or self.cycle.response_complete:
            # Empty lines before a request begin no message, but end uvicorn's keep-alive timeout.
            self._await_head()
        self._parsed_something = False
        super().data_received(data)
        self._unparsed_bytes = 0 if self._parsed_something else self._unparsed_bytes + len(data)
        if self._unparsed_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
        self._bound_unsent()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self._await_head()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            # One read has room for thousands of heads, and each queued request takes some 2 KiB.
            raise PipelineTooLong(f"at most {MAX_PIPELINED} requests of a connection may wait")
        self._head_timer.stop()
        if self._place is not None:
            self._limiter.set_busy(self._place)
        super().on_headers_complete()
        self.scope["state"][CONNECTION] = self
        # uvicorn resumes when the application asks for the body, and when the response is complete.
        self.flow.pause_reading()

    def on_body(self, body: bytes) -> None:
        self._parsed_something = True
        super().on_body(body)

    def on_response_complete(self) -> None:
        if self._early_cycle is not None:
            # A request behind an answer that ends the connection must not run.
            self.pipeline.clear()
            self.cycle = self._early_cycle
        super().on_response_complete()
        self._bound_unsent()
        if self._place is not None and self.cycle.response_complete:
            self._limiter.set_idle(self._place)
        if self.transport.is_closing():
            return
        if self._early_cycle is not None:
            self._linger()
        elif not self.cycle.response_complete:
            self.flow.pause_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._bound_unsent()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.cycle is not None and self.cycle.response_complete:
            self._bound_unsent()

    async def _closing_when_due(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_mark(message: Message) -> None:
            # While this answer waits for its client, a pipelined request may become `self.cycle`.
            cycle = self.cycle
            starts = message["type"] == "http.response.start"
            is_early = starts and cycle.scope is scope and cycle.more_body
            if is_early or (starts and self._is_draining()):
                message = {**message, "headers": [*message.get("headers", ()), CLOSE_HEADER]}
            await send(message)
            if is_early:
                self._early_cycle = cycle
                # uvicorn must not close at the end of the answer: `_linger` does, after what still arrives.
                cycle.keep_alive = True

        await self._application(scope, receive, send_and_mark)

    def _count(self, length: int) -> None:
        self._parsed_something = True
        self._head_bytes += length
        if self._head_bytes > MAX_HEAD_BYTES:
            raise HeadTooLarge(f"the head of a request has at most {MAX_HEAD_BYTES} bytes")

    def _evict(self) -> None:
        self._place = None
        self.transport.abort()

    def _await_head(self) -> None:
        if not self._head_timer.runs:
            self._head_timer.start(HEAD_S)

    def _head_is_late(self) -> None:
        # A pipelined head may wait behind a response that is still being written.
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _linger(self) -> None:
        self._lingering = True
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            # TLS cannot close one direction: there the length of the answer tells its end.
            self.transport.write_eof()
        self._linger_timer.start(LINGER_S)

    def _discard(self, size: int) -> None:
        self._discarded_bytes += size
        if self._discarded_bytes > LINGER_BYTES:
            self.flow.pause_reading()

    def _end_linger(self) -> None:
        self.transport.close()

    def _bound_unsent(self) -> None:
        """Give the client `stall_s`, and for a long answer more, to take what is written and not yet sent."""
        unsent = self.transport.get_write_buffer_size()
        if unsent:
            self._write_timer.start(self._stall_s + unsent / MIN_READ_BYTES_PER_S)

    def _end_stalled(self) -> None:
        # A stream that is not paused may write on: its unsent bytes are not those of the timer's start.
        is_stalled = self.flow.write_paused or self.cycle is None or self.cycle.response_complete
        if is_stalled and self.transport.get_write_buffer_size():
            self.transport.abort()


class _Timer:
    """Calls `action` once after `start`, unless it is started again or stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
        self._loop = loop
        self._action = action
        self._handle: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> bool:
        return self._handle is not None

    def start(self, seconds: float) -> None:
        self.stop()
        self._handle = self._loop.call_later(seconds, self._fire)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._action()
