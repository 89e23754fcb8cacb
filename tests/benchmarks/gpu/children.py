"""Processes that may die: forked from a server that has torch loaded, heard over pipes, killed when a case hangs.

Invariant: each named case ends with a line or with the reason why it has none, and nothing that hangs (a case, the start of
a process, the server itself) keeps the reader past `until`.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from threading import Thread
from typing import Any

PRELOADED = (
    *("torch", "loraplex.engine.engine", "transformers.models.auto.configuration_auto"),
    *("transformers.modeling_rope_utils", "tests.benchmarks.gpu.cases"),
)
"""By the server, once for all; nothing that reads TRITON_INTERPRET or asks for a GPU."""
PRELOADED_DRY = tuple(
    f"loraplex.engine.kernels.cpu.{name}"
    for name in ("paged_attention", "quantized_linear", "rms_norm", "rotary", "sgmv", "silu_mul")
)
LOST_DEVICE_EXIT = 75
"""Exit status of a process whose device answers no call any more: its case already has its line."""
END_S = 0.5
"""Of a stage's time: for processes to end when they are killed. One that waits inside a driver may not end at all."""
LINGER_S = 5.0
"""The next process waits so long for one that was killed and holds the GPU's memory yet."""
MAX_RESTARTS = 12
PR_SET_PDEATHSIG = 1
Line = dict[str, Any]


def forking_context(*, is_dry: bool) -> BaseContext:
    """Children start in milliseconds and hold no GPU of the parent's. The server begins to load at once."""
    context = get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *(PRELOADED_DRY if is_dry else ())])
    forkserver.ensure_running()
    return context


@dataclass(slots=True)
class Child:
    """One process. `begun` are the cases it began; each may take as long as `limits` says, in seconds."""

    process: Any
    connection: Connection
    limits: Mapping[str, float]
    begun: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    has_failed: bool = False
    is_missing: bool = False

    @property
    def current(self) -> str | None:
        return self.begun[-1] if self.begun else None

    @property
    def late_at(self) -> float:
        return self.began + self.limits[self.begun[-1]] if self.begun else float("inf")

    def begin(self, name: str) -> None:
        self.begun.append(name)
        self.began, self.has_failed, self.is_missing = time.monotonic(), False, False

    def line(self, line: Line) -> Line:
        """The line as one of the case in hand."""
        self.has_failed |= line["ok"] is False
        self.is_missing |= line["ok"] is None and line["error"].startswith("not installed")
        return line | {"work": self.current, "final": False}

    def end(self) -> Line:
        """The last line of the case in hand, with its seconds. What is not installed here may be measured elsewhere."""
        ok = False if self.has_failed else None if self.is_missing else True
        seconds = {"value": round(time.monotonic() - self.began, 3), "unit": "s"}
        return self.closing("end", ok) | seconds

    def failure(self, error: str) -> Line:
        """The last line of the case in hand, which failed; or that there is none yet."""
        return self.closing("run", False) | {"error": error, "final": self.current is not None}

    def closing(self, stage: str, ok: bool | None) -> Line:
        case = self.current or "start of a process"
        return {"stage": stage, "case": case, "ok": ok, "work": self.current, "final": True}


class ServerHangs(RuntimeError):
    """The server forks no process: it hangs in an import, or has died of one."""


def start(
    context: BaseContext,
    target: Callable[..., None],
    *arguments: Any,
    limits: Mapping[str, float],
    until: float,
) -> Child:
    """`target(connection, *arguments)` in a child that begins cases named in `limits`. Raises `ServerHangs` at `until`.

    A server that hangs is killed, so that the next call has a new one.
    """
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_enter, args=(target, sending, *arguments))  # type: ignore[attr-defined]
    errors: list[Exception] = []

    def begin() -> None:
        try:
            process.start()
        except (EOFError, OSError) as error:
            errors.append(error)

    # It waits for the server, which loads its modules first.
    starting = Thread(target=begin, daemon=True)
    starting.start()
    starting.join(max(0.0, until - time.monotonic()))
    if starting.is_alive() or errors:
        reason = f"died: {errors[0]!r}" if errors else "hangs"
        _end_server()
        raise ServerHangs(f"the server of processes {reason}")
    sending.close()
    return Child(process, receiving, limits)


def _enter(target: Callable[..., None], connection: Connection, *arguments: Any) -> None:
    """What a child does first: it is to end with its server, and that with the command, whatever the child hangs in."""
    # A server lives as long as someone has this open, and each of its children does.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    target(connection, *arguments)


def _end_server() -> None:
    """Kill the server, and wait a moment until the next `start` can see that it is dead."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is None:
        return
    os.kill(server, signal.SIGKILL)
    waited = time.monotonic() + END_S
    while time.monotonic() < waited:
        if os.waitid(os.P_PID, server, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.01)


@dataclass(slots=True)
class _Lane:
    """Cases that one process after the other takes up."""

    left: list[str]
    child: Child | None = None
    processes: int = 0
    is_stuck: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether another process takes up what is left: not where the last one began nothing."""
        return bool(self.left) and not self.is_stuck and self.processes <= MAX_RESTARTS


@dataclass(slots=True)
class Supervisor:
    """Runs named cases in processes, and in a new one from the next case on when one ends. Counts those."""

    context: BaseContext
    restarts: int = 0
    _killed: list[Any] = field(default_factory=list)

    def run(
        self,
        target: Callable[..., None],
        *arguments: Any,
        limits: Mapping[str, float],
        until: float,
        processes: int = 1,
    ) -> Iterator[Line]:
        """Lines of `target(connection, *arguments, names)` in that many processes, the names of `limits` shared out.

        Each has the case it belongs to as `work`, and the last one of a case is `final`. No process lives past `until`, nor
        past the reading of its lines. What was not reached has a line that says so, which is no last one.
        """
        names = list(limits)
        lanes = [_Lane(share) for first in range(processes) if (share := names[first::processes])]
        deadline = until - END_S
        try:
            yield from self._lines_of(lanes, target, arguments, limits, deadline)
        finally:
            self._kill([lane.child for lane in lanes if lane.child], until)

    def _lines_of(
        self,
        lanes: Sequence[_Lane],
        target: Callable[..., None],
        arguments: Sequence[Any],
        limits: Mapping[str, float],
        deadline: float,
    ) -> Iterator[Line]:
        active = list(lanes)
        while active and time.monotonic() < deadline:
            for lane in [lane for lane in active if lane.child is None]:
                self._await_killed(deadline)
                self.restarts += lane.processes > 0
                lane.processes += 1
                try:
                    lane.child = start(
                        self.context, target, *arguments, lane.left, limits=limits, until=deadline
                    )
                except ServerHangs as error:
                    yield _unstarted(str(error))
                    lane.is_stuck = True
            yield from self._heard([lane for lane in active if lane.child], deadline)
            active = [lane for lane in active if lane.child or lane.goes_on]
        is_over = time.monotonic() >= deadline
        yield from _left_over(lanes, is_over=is_over, is_only=len(limits) == 1)

    def _heard(self, lanes: Sequence[_Lane], deadline: float) -> Iterator[Line]:
        """What has come by the time that something comes, is late or ends."""
        if not lanes:
            return
        children = {lane.child.connection: lane for lane in lanes if lane.child}
        late_at = min(lane.child.late_at for lane in lanes if lane.child)
        ready = wait(list(children), timeout=max(0.0, min(deadline, late_at) - time.monotonic()))
        for connection, lane in children.items():
            child = lane.child
            assert child is not None
            if connection in ready:
                try:
                    kind, content = child.connection.recv()
                except (EOFError, OSError):
                    yield from self._ended(lane, child, deadline)
                    continue
                if kind == "begin":
                    if child.current is not None:
                        yield child.end()
                    child.begin(content)
                    lane.left.remove(content)
                else:
                    yield child.line(content)
            elif child.late_at <= time.monotonic() < deadline:
                limit = child.limits[child.begun[-1]]
                yield child.failure(f"killed: it took longer than its {limit:.0f} s")
                self._kill([child], deadline)
                lane.child = None

    def _ended(self, lane: _Lane, child: Child, deadline: float) -> Iterator[Line]:
        """The last line of a process that has closed its pipe."""
        lane.child = None
        child.process.join(max(0.0, min(LINGER_S, deadline - time.monotonic())))
        status = child.process.exitcode
        if status is None:
            self._kill([child], deadline)
        # A process that has sent everything may be late to end without harm.
        if status in (None, 0, LOST_DEVICE_EXIT):
            if child.current is not None:
                yield child.end()
        else:
            yield child.failure(f"the process ended with {status}")
        lane.is_stuck = not child.begun

    def _kill(self, children: Sequence[Child], until: float) -> None:
        for child in children:
            child.process.kill()
        waited = min(until, time.monotonic() + END_S)
        for child in children:
            child.process.join(max(0.0, waited - time.monotonic()))
            if child.process.exitcode is None:
                self._killed.append(child.process)

    def _await_killed(self, deadline: float) -> None:
        """Once: what does not end in that time may never end."""
        waited = min(deadline, time.monotonic() + LINGER_S)
        for process in self._killed:
            process.join(max(0.0, waited - time.monotonic()))
        self._killed.clear()


def _left_over(lanes: Sequence[_Lane], *, is_over: bool, is_only: bool) -> Iterator[Line]:
    """Of cases that have no last line. One that had its stage's whole time for itself alone has failed."""
    for lane in lanes:
        child = lane.child
        if child is not None and child.current is not None:
            if is_only:
                yield child.failure("killed: it took longer than its stage's time")
            else:
                yield not_run(child.current, "its stage's time was over") | {"work": child.current}
        elif child is not None:
            yield _unstarted("killed: it began no case in its stage's time")
        reason = "its stage's time was over" if is_over else "its process could not go on"
        yield from (not_run(name, reason) | {"work": name} for name in lane.left)


def _unstarted(error: str) -> Line:
    return {"stage": "run", "case": "start of a process", "ok": False, "error": error}


def not_run(name: str, reason: str) -> Line:
    """The line of a case that was never tried."""
    return {"stage": "run", "case": name, "ok": None, "error": f"not run: {reason}"}
