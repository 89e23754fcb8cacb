"""A child process that undoes the faults of a drill which was killed, or which hangs beyond its time.

Invariant: what was added before a fault began and was not dropped is undone once the drill's end of the pipe is closed, or
the time is over, whichever comes first. The child has a session of its own: no signal of a terminal reaches it.
"""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import suppress
from select import select
from types import TracebackType
from typing import Final, Self

import msgspec

from loraplex.platform.drills.errors import DrillImpossible
from loraplex.platform.drills.undo import Undo
from loraplex.platform.processes.child_process import module_command
from loraplex.platform.processes.environment import foreign_environment

MODULE: Final = "loraplex.platform.drills.watchdog"
READY: Final = b"ready\n"
RETRY_S: Final = 1.0
UNDO_S: Final = 300.0
"""How long an undo that fails is repeated, as while PostgreSQL is starting."""
READ_BYTES: Final = 1 << 16


class Duty(msgspec.Struct, frozen=True):
    """An undo to do unless a later duty of the same number is `dropped`."""

    number: int
    undo: Undo | None = None
    dropped: bool = False


class DrillWatchdog:
    """The drill's end of its watchdog, which acts at the end of this process or after `limit_s` seconds."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._child: subprocess.Popen[bytes] | None = None
        self._added = 0

    async def __aenter__(self) -> Self:
        """Start the child. What is added before it is ready waits for it."""
        self._child = await asyncio.to_thread(_start, self._limit_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the child undo what was not dropped, and wait for its end."""
        if self._child is not None:
            await asyncio.to_thread(self._child.communicate)

    async def ready(self) -> None:
        """Wait until the child watches. Raises `DrillImpossible` if it does not."""
        output = None if self._child is None else self._child.stdout
        if output is None or await asyncio.to_thread(output.readline) != READY:
            raise DrillImpossible("the drill's watchdog did not start")

    def add(self, undo: Undo) -> int:
        """Have this undone unless it is dropped by its number. Raises `DrillImpossible` if the child is gone."""
        self._added += 1
        try:
            self._send(Duty(self._added, undo))
        except BrokenPipeError as error:
            raise DrillImpossible("the drill's watchdog has ended") from error
        return self._added

    def drop(self, number: int) -> None:
        """The drill has undone this itself. A child whose time was over has undone it, too, and is gone."""
        with suppress(BrokenPipeError):
            self._send(Duty(number, dropped=True))

    def _send(self, duty: Duty) -> None:
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.write(msgspec.json.encode(duty) + b"\n")
            self._child.stdin.flush()


def _start(limit_s: float) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        module_command(MODULE, str(limit_s)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=foreign_environment(),
        start_new_session=True,
    )


def read_duties(limit_s: float) -> list[Undo]:
    """Read standard input until its end or the limit; return what is left to undo, the last added first."""
    deadline = time.monotonic() + limit_s
    left: dict[int, Undo] = {}
    rest = b""
    while select([0], [], [], max(0.0, deadline - time.monotonic()))[0]:
        data = os.read(0, READ_BYTES)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            duty = msgspec.json.decode(line, type=Duty)
            if duty.undo is not None:
                left[duty.number] = duty.undo
            else:
                left.pop(duty.number, None)
    return [*left.values()][::-1]


async def undo_all(duties: list[Undo]) -> None:
    """Undo each, again and again for `UNDO_S` where it fails: one that fails keeps none of the others."""
    deadline = time.monotonic() + UNDO_S
    while duties and time.monotonic() < deadline:
        failed = []
        for duty in duties:
            try:
                await duty.run()
            except Exception as error:  # noqa: BLE001 - reported and repeated; the others must be undone too
                print(f"drill: {type(duty).__name__} failed: {error}", file=sys.stderr)
                failed.append(duty)
        duties = failed
        if duties:
            await asyncio.sleep(RETRY_S)


def main() -> None:
    """Watch until the drill has ended; `argv` has the limit in seconds."""
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()
    asyncio.run(undo_all(read_duties(float(sys.argv[1]))))


if __name__ == "__main__":
    main()
