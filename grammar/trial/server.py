"""The warm process's loop: reads orders, forks one child per check, reports results.

Invariant: no child outlives its deadline, and each order to check gets exactly one result.
"""

import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from loraplex.grammar.spec import GrammarSpec
from loraplex.grammar.trial.child import FirstMask, run_check
from loraplex.grammar.trial.error_texts import clean
from loraplex.grammar.trial.messages import (
    Cancel,
    CheckResult,
    CompileResult,
    Order,
    Outcome,
    SandboxLimits,
    StartCheck,
    decode_check_result,
)
from loraplex.grammar.trial.orders import OrderSource

READ_BYTES: Final = 65_536
STARVED_SHARE: Final = 0.1
"""A check that had less than this share of its CPU seconds until the deadline says nothing about the grammar."""


@dataclass(slots=True)
class RunningCheck:
    """A forked child. `pipe` delivers its result; `end` is why it was killed; `is_reported`: its result was sent."""

    check_id: int
    pid: int
    pipe: int
    started: float
    written: bytearray = field(default_factory=bytearray)
    end: Outcome | None = None
    is_reported: bool = False


class ForkServer:
    """Runs checks until its input ends. `report` sends a result to the gateway; `first_mask` runs in the child."""

    def __init__(
        self, first_mask: FirstMask, limits: SandboxLimits, report: Callable[[CompileResult], None]
    ) -> None:
        self._first_mask = first_mask
        self._limits = limits
        self._report = report
        self._running: dict[int, RunningCheck] = {}
        self._selector = selectors.DefaultSelector()

    def serve(self, orders: OrderSource) -> None:
        """Return when `orders` end; all children are dead then."""
        self._selector.register(orders.descriptor, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(self._until_next_deadline()):
                if key.data is not None:
                    self._receive_from(key.data)
                    continue
                arrived = orders.read()
                if arrived is None:
                    return self._end_all()
                for order in arrived:
                    self._execute(order)
            self._kill_overdue()

    def _execute(self, order: Order) -> None:
        match order:
            case StartCheck(check_id, spec):
                self._start(check_id, spec)
            case Cancel(check_id) if check_id in self._running:
                self._kill(self._running[check_id], "cancelled")

    def _start(self, check_id: int, spec: GrammarSpec) -> None:
        reading, writing = os.pipe()
        parent_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            return self._report(fork_failed(check_id, error))
        if pid == 0:
            run_check(self._first_mask, spec, self._limits, writing, parent_pid)
        os.close(writing)
        check = RunningCheck(check_id, pid, reading, time.monotonic())
        self._running[check_id] = check
        self._selector.register(reading, selectors.EVENT_READ, check)

    def _receive_from(self, check: RunningCheck) -> None:
        """Report a result before its process has ended, which takes as long as a small check."""
        if data := os.read(check.pipe, READ_BYTES):
            check.written += data
            self._pass_on(check)
            return
        self._selector.unregister(check.pipe)
        os.close(check.pipe)
        del self._running[check.check_id]
        _, status, usage = os.wait4(check.pid, 0)
        if not check.is_reported:
            cpu_s = usage.ru_utime + usage.ru_stime
            self._report_result(check, self._result_of_end(check, status, cpu_s), cpu_s)

    def _pass_on(self, check: RunningCheck) -> None:
        try:
            result = decode_check_result(check.written)
        except msgspec.DecodeError:
            return  # incomplete; the rest follows, or the exit status decides
        if check.end is None and not check.is_reported:
            self._report_result(check, result, result.cpu_s)

    def _report_result(self, check: RunningCheck, result: CheckResult, cpu_s: float) -> None:
        check.is_reported = True
        self._report(
            CompileResult(
                check_id=check.check_id,
                outcome=result.outcome,
                text=result.text,
                wall_s=time.monotonic() - check.started,
                cpu_s=cpu_s,
                bytes=result.bytes,
            )
        )

    def _result_of_end(self, check: RunningCheck, status: int, cpu_s: float) -> CheckResult:
        if check.end == "deadline" and cpu_s < STARVED_SHARE * self._limits.cpu_s:
            return CheckResult("starved")
        return CheckResult(check.end or _outcome_of_status(status))

    def _until_next_deadline(self) -> float | None:
        if not self._running:
            return None
        earliest = min(check.started for check in self._running.values())
        return max(0.0, earliest + self._limits.deadline_s - time.monotonic())

    def _kill_overdue(self) -> None:
        overdue = time.monotonic() - self._limits.deadline_s
        for check in self._running.values():
            if check.started <= overdue and check.end is None:
                self._kill(check, "deadline")

    def _kill(self, check: RunningCheck, end: Outcome) -> None:
        """Kill the child. It is not reaped before its pipe has ended, so its id cannot be reused."""
        if check.end is None:
            check.end = end
            os.kill(check.pid, signal.SIGKILL)

    def _end_all(self) -> None:
        for check in self._running.values():
            self._kill(check, "cancelled")
            os.waitpid(check.pid, 0)


def fork_failed(check_id: int, error: OSError) -> CompileResult:
    """Return the result for a failed fork, which says nothing about the grammar."""
    return CompileResult(
        check_id=check_id, outcome="starved", text=clean(str(error)), wall_s=0.0, cpu_s=0.0, bytes=0
    )


def _outcome_of_status(status: int) -> Outcome:
    """Return why a child ended without a result. A library that cannot allocate may abort."""
    if not os.WIFSIGNALED(status):
        return "crashed"
    match os.WTERMSIG(status):
        case signal.SIGXCPU:
            return "cpu"
        case signal.SIGABRT:
            return "memory"
        case _:
            return "crashed"
