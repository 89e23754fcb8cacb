"""The warm process's loop: orders in, one forked child per trial, verdicts out.

Invariant: no child outlives its deadline, and every order to try is answered by exactly one verdict.
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
from loraplex.grammar.trial.child import FirstMask, run_trial
from loraplex.grammar.trial.error_texts import clean
from loraplex.grammar.trial.messages import (
    Cancel,
    CompileResult,
    Judgement,
    Order,
    Outcome,
    SandboxLimits,
    Try,
    decode_judgement,
)
from loraplex.grammar.trial.orders import OrderSource

READ_BYTES: Final = 65_536
STARVED_SHARE: Final = 0.1
"""A trial that had less than this share of its CPU seconds until the deadline says nothing about the grammar."""


@dataclass(slots=True)
class Trial:
    """A child. `pipe` is where its judgement comes; `end` is what it was killed for, `answered` that its verdict is out."""

    trial_id: int
    pid: int
    pipe: int
    started: float
    written: bytearray = field(default_factory=bytearray)
    end: Outcome | None = None
    answered: bool = False


class TrialServer:
    """Runs trials until its input ends. `report` tells the gateway; `first_mask` is what a child does."""

    def __init__(
        self, first_mask: FirstMask, limits: SandboxLimits, report: Callable[[CompileResult], None]
    ) -> None:
        self._first_mask = first_mask
        self._limits = limits
        self._report = report
        self._running: dict[int, Trial] = {}
        self._selector = selectors.DefaultSelector()

    def serve(self, orders: OrderSource) -> None:
        """Returns when `orders` end; every child is dead then."""
        self._selector.register(orders.descriptor, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(self._until_next_deadline()):
                if key.data is not None:
                    self._hear(key.data)
                    continue
                arrived = orders.read()
                if arrived is None:
                    return self._end_all()
                for order in arrived:
                    self._obey(order)
            self._kill_overdue()

    def _obey(self, order: Order) -> None:
        match order:
            case Try(trial_id, spec):
                self._start(trial_id, spec)
            case Cancel(trial_id) if trial_id in self._running:
                self._kill(self._running[trial_id], "cancelled")

    def _start(self, trial_id: int, spec: GrammarSpec) -> None:
        reading, writing = os.pipe()
        parent_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            return self._report(unforked(trial_id, error))
        if pid == 0:
            run_trial(self._first_mask, spec, self._limits, writing, parent_pid)
        os.close(writing)
        trial = Trial(trial_id, pid, reading, time.monotonic())
        self._running[trial_id] = trial
        self._selector.register(reading, selectors.EVENT_READ, trial)

    def _hear(self, trial: Trial) -> None:
        """A judgement is passed on before its process has ended, which takes as long as a small trial itself."""
        if data := os.read(trial.pipe, READ_BYTES):
            trial.written += data
            self._pass_on(trial)
            return
        self._selector.unregister(trial.pipe)
        os.close(trial.pipe)
        del self._running[trial.trial_id]
        _, status, usage = os.wait4(trial.pid, 0)
        if not trial.answered:
            cpu_s = usage.ru_utime + usage.ru_stime
            self._answer(trial, self._judged_by_end(trial, status, cpu_s), cpu_s)

    def _pass_on(self, trial: Trial) -> None:
        try:
            judgement = decode_judgement(trial.written)
        except msgspec.DecodeError:
            return  # the rest is still to come, or the way it ends will tell
        if trial.end is None and not trial.answered:
            self._answer(trial, judgement, judgement.cpu_s)

    def _answer(self, trial: Trial, judgement: Judgement, cpu_s: float) -> None:
        trial.answered = True
        self._report(
            CompileResult(
                trial_id=trial.trial_id,
                outcome=judgement.outcome,
                text=judgement.text,
                wall_s=time.monotonic() - trial.started,
                cpu_s=cpu_s,
                bytes=judgement.bytes,
            )
        )

    def _judged_by_end(self, trial: Trial, status: int, cpu_s: float) -> Judgement:
        if trial.end == "deadline" and cpu_s < STARVED_SHARE * self._limits.cpu_s:
            return Judgement("starved")
        return Judgement(trial.end or _outcome_of_status(status))

    def _until_next_deadline(self) -> float | None:
        if not self._running:
            return None
        earliest = min(trial.started for trial in self._running.values())
        return max(0.0, earliest + self._limits.deadline_s - time.monotonic())

    def _kill_overdue(self) -> None:
        overdue = time.monotonic() - self._limits.deadline_s
        for trial in self._running.values():
            if trial.started <= overdue and trial.end is None:
                self._kill(trial, "deadline")

    def _kill(self, trial: Trial, end: Outcome) -> None:
        """The child is not reaped before its pipe has ended, so its id cannot be another's."""
        if trial.end is None:
            trial.end = end
            os.kill(trial.pid, signal.SIGKILL)

    def _end_all(self) -> None:
        for trial in self._running.values():
            self._kill(trial, "cancelled")
            os.waitpid(trial.pid, 0)


def unforked(trial_id: int, error: OSError) -> CompileResult:
    """No process could be made for it: nothing is known of the grammar."""
    return CompileResult(
        trial_id=trial_id, outcome="starved", text=clean(str(error)), wall_s=0.0, cpu_s=0.0, bytes=0
    )


def _outcome_of_status(status: int) -> Outcome:
    """Why a child ended without a judgement. A library that cannot allocate may abort."""
    if not os.WIFSIGNALED(status):
        return "crashed"
    match os.WTERMSIG(status):
        case signal.SIGXCPU:
            return "cpu"
        case signal.SIGABRT:
            return "memory"
        case _:
            return "crashed"
