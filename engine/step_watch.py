"""Finds a step that takes too long while it runs: what it computes, and where every thread of the process is.

Invariant: it names requests and adapters by their ids and digests, and nothing of what a prompt or a response says. A step is
reported once, measured from its start. The step thread only assigns; another one reads.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from loraplex.engine.batch.step_plan import PlannedRow, StepPlan

MAX_ROWS: Final = 64
MAX_FRAMES: Final = 60


@dataclass(frozen=True, slots=True)
class SlowStep:
    """A step that was still running after `seconds`. `step`: its computation, None before it was planned."""

    seconds: float
    step: dict[str, Any] | None
    stacks: dict[str, str]


class StepWatch:
    """Watches the steps of one engine. Steps that run longer than `limit_s` are slow; `num_slow` counts those found."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self.num_slow = 0
        self._clock = clock
        self._began: float | None = None
        self._plan: StepPlan | None = None
        self._reported: float | None = None

    def begin(self) -> None:
        """A step begins."""
        self._began = self._clock()

    def launch(self, plan: StepPlan) -> None:
        """The step computes `plan`, and with overlap ends what the one before launched."""
        self._plan = plan

    def end(self) -> None:
        """The step has ended."""
        self._began = self._plan = None

    def check(self) -> SlowStep | None:
        """Return the running step, if it is slow and was not returned before. Called on another thread than the step's."""
        began, plan = self._began, self._plan
        if began is None or began == self._reported:
            return None
        seconds = self._clock() - began
        if seconds < self.limit_s:
            return None
        self._reported = began
        self.num_slow += 1
        return SlowStep(seconds, None if plan is None else _described(plan), stacks_of_all_threads())


def stacks_of_all_threads() -> dict[str, str]:
    """The stack of each thread by its name and native id, the innermost frame last: files, lines and functions, no values."""
    names = {thread.ident: f"{thread.name} {thread.native_id}" for thread in threading.enumerate()}
    return {
        names.get(ident, str(ident)): "".join(traceback.format_stack(frame)[-MAX_FRAMES:])
        for ident, frame in sys._current_frames().items()
    }


def _described(plan: StepPlan) -> dict[str, Any]:
    """The step in numbers and ids, with at most `MAX_ROWS` of its rows."""
    adapters = {row.adapter.digest for row in plan.rows if row.adapter is not None}
    return {
        "rows": len(plan.rows),
        "tokens": plan.num_tokens,
        "adapters": sorted(adapters)[:MAX_ROWS],
        "some_rows": [*map(_row, plan.rows[:MAX_ROWS])],
    }


def _row(row: PlannedRow) -> str:
    sequence = row.sequence
    return f"{sequence.request_id}#{sequence.choice} {len(row.token_ids)} tokens at {row.start}"
