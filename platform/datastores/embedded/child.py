"""Runs a server as a foreground child of this process.

Invariant: it ends when the thread that started it ends, for any reason. Start children only from a thread that lives as long
as they must.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from loraplex.platform.datastores.embedded.errors import ServiceFailed
from loraplex.platform.datastores.embedded.identity import Identity

MAX_LOG_BYTES = 16 * 2**20
LOG_TAIL_BYTES = 2000
GUARDED_EXEC = Path(__file__).with_name("guarded_exec.py")


@dataclass(frozen=True)
class ChildCommand:
    """Command of a child. `folder` becomes the working directory before the uid is dropped, so a server that uses relative file
    names needs no permission on the parent folders."""

    name: str
    arguments: tuple[str, ...]
    folder: Path
    log: Path
    identity: Identity
    death_signal: signal.Signals
    remedy: str
    standard_input: str = field(default="", repr=False)

    def wrapped(self) -> list[str]:
        guard = [os.getpid(), int(self.death_signal), self.identity.uid, self.identity.gid]
        return [sys.executable, "-I", "-S", str(GUARDED_EXEC), *map(str, guard), *self.arguments]


class Child:
    """A running child process."""

    def __init__(self, command: ChildCommand) -> None:
        self._command = command
        with open_log(command.log) as log:
            self._log_begins = os.fstat(log.fileno()).st_size
            self._process = subprocess.Popen(
                command.wrapped(),
                cwd=command.folder,
                env={"TZ": "UTC", "LC_ALL": "C", "PATH": "/usr/bin:/bin"},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._feed(command.standard_input)

    @property
    def pid(self) -> int:
        return self._process.pid

    def running(self) -> bool:
        return self._process.poll() is None

    def check_running(self) -> None:
        """Raises `ServiceFailed` with the end of the log if the child has ended."""
        if not self.running():
            raise self.failure(f"ended with status {self._process.returncode}")

    def failure(self, reason: str) -> ServiceFailed:
        return ServiceFailed(
            f"{self._command.name} {reason}; if its files are damaged, {self._command.remedy}; end of {self._command.log}:\n"
            f"{self._log_tail()}"
        )

    def wait(self, timeout: float) -> int:
        """Wait for a child that ends by itself; kill it after `timeout` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise self.failure(f"did not finish within {timeout:g} s") from None

    def stop(self, steps: Sequence[tuple[signal.Signals, float]]) -> None:
        """Send each signal in turn and wait its seconds, then send SIGKILL."""
        for number, seconds in steps:
            self._process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                return
        self._process.kill()
        self._process.wait()

    def _feed(self, text: str) -> None:
        if self._process.stdin is None:
            return
        try:
            with self._process.stdin as pipe:
                pipe.write(text.encode())
        except BrokenPipeError:
            self._process.wait()
            self.check_running()

    def _log_tail(self) -> str:
        with self._command.log.open("rb") as log:
            log.seek(max(self._log_begins, self._command.log.stat().st_size - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").strip()


class ChildServer:
    """A server that runs as a child. The thread that owns the children makes all calls."""

    stop_steps: Sequence[tuple[signal.Signals, float]]

    def __init__(self) -> None:
        self._child: Child | None = None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def running(self) -> bool:
        return self._child is not None and self._child.running()

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop(self.stop_steps)
            self._child = None


def open_log(path: Path) -> BinaryIO:
    """Open a log (mode 0600) for appending; truncate it if it is longer than `MAX_LOG_BYTES`."""
    too_long = path.exists() and path.stat().st_size > MAX_LOG_BYTES
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if too_long else 0)
    return os.fdopen(os.open(path, flags, 0o600), "ab")
