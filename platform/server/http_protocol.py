"""uvicorn's HTTP/1.1 protocol with bounds on the size of a request's head and on the time it may take to arrive.

Invariant: before authentication a connection costs this process at most `MAX_HEAD_BYTES` and one read, for `HEAD_S` seconds.
The parser alone would collect a head of any size (RFC 9112, 2.2 and 3 leave the limits to servers).
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
HEAD_S = 30.0


class HeadTooLarge(Exception):
    """Raised inside the parser, which responds 400 and closes the connection."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Counts the request line and the headers as they arrive; uvicorn handles everything after them."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_bytes = 0
        self._unparsed_bytes = 0
        self._parsed_something = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Also bound a header, trailer or chunk extension that never ends: the parser reports it only at its end."""
        self._parsed_something = False
        super().data_received(data)
        self._unparsed_bytes = 0 if self._parsed_something else self._unparsed_bytes + len(data)
        if self._unparsed_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

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
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._parsed_something = True
        super().on_body(body)

    def _count(self, length: int) -> None:
        self._parsed_something = True
        self._head_bytes += length
        if self._head_bytes > MAX_HEAD_BYTES:
            raise HeadTooLarge(f"the head of a request has at most {MAX_HEAD_BYTES} bytes")

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        # A pipelined head may wait behind a response that is still being written.
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
