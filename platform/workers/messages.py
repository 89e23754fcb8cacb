"""Messages between a gateway and a worker process: msgpack with a length prefix of eight bytes.

Invariant: a reply is a result, an error by its class, or how the process ended. It never has a traceback.
"""

import os
from collections.abc import Callable
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

from loraplex.platform.workers.task import How, Sandbox

LENGTH_BYTES: Final = 8
READ_BYTES: Final = 1 << 20

Decoded = TypeVar("Decoded")
Inner = TypeVar("Inner")
Result = TypeVar("Result")


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a process. Fields as in `TaskSpec`; `setup` is encoded, `descriptors` stay open."""

    parent_pid: int
    function: str
    setup: bytes | None
    refusals: frozenset[str]
    forks: bool
    sandbox: Sandbox
    deadline_s: float
    max_reply_bytes: int
    descriptors: tuple[int, ...]


class Job(msgspec.Struct, Generic[Inner], frozen=True, tag="job"):
    """Run the function on the payload, a tuple of its arguments."""

    job_id: int
    payload: Inner


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Kill this job: no caller waits for it any more."""

    job_id: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process is set up and takes jobs."""


class Unavailable(msgspec.Struct, frozen=True, tag="unavailable"):
    """This machine cannot run or confine a task now; nothing of it was read."""

    reason: str


class Report(msgspec.Struct, frozen=True, tag="report"):
    """The end of a job. `reply` is an encoded `Reply`, of which a fork server reads nothing, or an `Unavailable`."""

    job_id: int
    reply: bytes


class Done(msgspec.Struct, Generic[Result], frozen=True, tag="done"):
    """The function returned. `cpu_s` is the job's CPU time."""

    result: Result
    cpu_s: float = 0.0


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The function raised one of the task's `refusals`: the name of that class and its text.

    `param` and `pointer` are the error's fields of that name, None where it has none.
    """

    error: str
    message: str
    param: str | None = None
    pointer: str | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The function raised an error that no input should cause: its class. Its text may quote untrusted input."""

    error: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The process ended, or was killed, before it replied. `exit_code` below 0 is the number of the signal, negated."""

    how: How
    exit_code: int
    cpu_s: float = 0.0


Reply: TypeAlias = Done[Result] | Refused | Failed | Ended
"""What a caller of the pool gets."""
Request: TypeAlias = Job[msgspec.Raw] | Cancel


def untrusted(decode: Callable[[bytes], Decoded]) -> Callable[[bytes], Decoded]:
    """Return a decoder of what a worker has written. It raises `DecodeError`, whatever is wrong with the bytes."""

    def decode_untrusted(data: bytes) -> Decoded:
        try:
            return decode(data)
        # msgspec raises errors of its own neither for text that is no UTF-8 nor for deep nesting.
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(type(error).__name__) from error

    return decode_untrusted


encode: Final = msgspec.msgpack.Encoder().encode
decode_start: Final = msgspec.msgpack.Decoder(Start).decode
decode_job: Final = msgspec.msgpack.Decoder(Job[msgspec.Raw]).decode
decode_request: Final[Callable[[bytes], Request]] = msgspec.msgpack.Decoder(Request).decode
decode_status: Final[Callable[[bytes], Ready | Unavailable | Report]] = untrusted(
    msgspec.msgpack.Decoder(Ready | Unavailable | Report).decode
)


def frame(data: bytes) -> bytes:
    """Return an encoded message with its length prefix."""
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


class MessageReader:
    """Splits what a descriptor delivers into messages. It reads on request only, so that a poll on it shows what arrived."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._rest = bytearray()

    def next(self) -> bytes | None:
        """Return the next message, None at the end of input. Blocks."""
        while (message := self._take()) is None:
            if not self._receive():
                return None
        return message

    def arrived(self) -> list[bytes] | None:
        """Return the messages that one read completes, None at the end of input."""
        if not self._receive():
            return None
        messages = []
        while (message := self._take()) is not None:
            messages.append(message)
        return messages

    def _receive(self) -> bool:
        data = os.read(self.descriptor, READ_BYTES)
        self._rest += data
        return bool(data)

    def _take(self) -> bytes | None:
        end = LENGTH_BYTES + int.from_bytes(self._rest[:LENGTH_BYTES], "big")
        if len(self._rest) < max(end, LENGTH_BYTES):
            return None
        message = bytes(self._rest[LENGTH_BYTES:end])
        del self._rest[:end]
        return message


def write_message(descriptor: int, data: bytes) -> None:
    """Write an encoded message with its length prefix. Blocks."""
    left = memoryview(frame(data))
    while left:
        left = left[os.write(descriptor, left) :]
