"""Reads a gateway's orders from a descriptor and writes reports back. Invariant: whole lines only."""

import os
from typing import BinaryIO, Final

from loraplex.grammar.trial.messages import (
    MAX_LINE_BYTES,
    CompileSpawn,
    Order,
    Report,
    decode_order,
    decode_spawn,
    encode,
)

READ_BYTES: Final = 1 << 20


class OrderSource:
    """Reads its descriptor only on request, so that a poll on it always shows what has arrived."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._rest = b""

    def spawn(self) -> CompileSpawn | None:
        """Return the first line, None when the other end is closed. Blocks."""
        while b"\n" not in self._rest:
            if not self._receive():
                return None
        line, _, self._rest = self._rest.partition(b"\n")
        return decode_spawn(line)

    def read(self) -> list[Order] | None:
        """Return the orders that one read completes, None at the end of input. Raises ValueError for an endless line."""
        if not self._receive():
            return None
        *lines, self._rest = self._rest.split(b"\n")
        return [decode_order(line) for line in lines]

    def _receive(self) -> bool:
        data = os.read(self.descriptor, READ_BYTES)
        self._rest += data
        if len(self._rest) > MAX_LINE_BYTES:
            raise ValueError(f"an order of more than {MAX_LINE_BYTES} bytes")
        return bool(data)


class Reporter:
    """Takes standard output over; output of libraries goes to standard error instead."""

    def __init__(self) -> None:
        self._pipe: BinaryIO = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)

    def __call__(self, report: Report) -> None:
        self._pipe.write(encode(report) + b"\n")
