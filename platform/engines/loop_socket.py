"""A ZeroMQ socket on an event loop: messages are handed to a function in the turn in which they came, sends never wait.

Invariant: no message stays unread while the loop runs. The descriptor of a socket only signals changes, and sending and
receiving consume that signal, so the socket's state is read after each
(https://libzmq.readthedocs.io/en/latest/zmq_getsockopt.html).
"""

import asyncio
from collections.abc import Callable
from typing import Final

import zmq

# Plain numbers: the operators of the enumerations cost more than the calls that take them.
EVENTS: Final = int(zmq.EVENTS)
POLLIN: Final = int(zmq.POLLIN)
NOBLOCK: Final = int(zmq.NOBLOCK)
MORE: Final = int(zmq.SNDMORE | zmq.NOBLOCK)
AT_ONCE: Final = 64
"""Messages of one turn of the event loop, which then runs what else is due."""


class LoopSocket:
    """Reads a bound or connecting socket until `close`, and owns it. `on_message` gets the frames of each message."""

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.get(zmq.FD))
        self._due: asyncio.Handle | None = None
        self._loop.add_reader(self._descriptor, self._read)
        # What came before the descriptor was watched.
        self._read_soon()

    def send(self, *frames: bytes) -> None:
        """Give a message to the socket. Raises `zmq.Again` where its queue is full, and other `zmq.ZMQError`."""
        try:
            for frame in frames[:-1]:
                self._socket.send(frame, MORE)
            self._socket.send(frames[-1], NOBLOCK)
        finally:
            if self._due is None and self._is_readable():
                self._read_soon()

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket; what was sent has `linger_s` to leave. No message is read after this."""
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close(linger=round(1000 * linger_s))

    def _is_readable(self) -> bool:
        return not self._socket.closed and bool(int(self._socket.get(EVENTS)) & POLLIN)

    def _read_soon(self) -> None:
        """Read in the next turn of the event loop, once."""
        if self._due is None:
            self._due = self._loop.call_soon(self._read)

    def _read(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        taken = 0
        while taken < AT_ONCE and self._is_readable():
            taken += 1
            try:
                self._on_message(self._socket.recv_multipart(NOBLOCK))
            except BaseException:
                # The descriptor says nothing of the messages behind this one.
                self._read_soon()
                raise
        if taken == AT_ONCE:
            self._read_soon()
