"""`StepIsolation`: runs steps such that an exception in one fails only the rows that cause it (group testing by bisection).

Invariant: a failed step has changed no state that it does not write again: K and V only at positions that do not count as
computed. So its rows are run again in parts. The engine ends if the device is lost, or if it cannot even run a step without
any request.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Collection

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.batch.step_plan import PlannedRow, SampledToken, StepPlan
from loraplex.engine.errors import StepFailed
from loraplex.engine.runner.launched_step import LaunchedStep
from loraplex.engine.runner.model_runner import ModelRunner

RUNS_PER_LEVEL = 4
"""Runs per level of the bisection, in all: enough to find two rows that share no half."""

_logger = logging.getLogger(__name__)


class IsolatedStep:
    """A `LaunchedStep` whose exceptions are kept until `collect`. Made by `StepIsolation.launch`."""

    def __init__(self, plan: StepPlan, isolation: "StepIsolation") -> None:
        self.plan = plan
        self._isolation = isolation
        self._step: LaunchedStep | None = None
        self._late: list[Sequence] = []
        self._error: Exception | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a stage has raised. Then the step is run again in `collect`, after every earlier step is completed."""
        return self._error is not None

    @property
    def sampled_sequences(self) -> Collection[Sequence]:
        """The sequences that will get a token."""
        return () if self._step is None else self._step.sampled_sequences

    def launch(self, runner: ModelRunner, rows: list[PlannedRow] | None) -> None:
        """See `ModelRunner.launch`."""
        try:
            self._step = runner.launch(self.plan, rows)
        except Exception as error:  # noqa: BLE001 - reported by `collect`
            self._error = error

    def follow(self, before: "IsolatedStep") -> None:
        """Fail with the step before, whose tokens this one was launched with."""
        self._error = self._error or before._error

    def sample(self, rows: list[PlannedRow]) -> list[Sequence]:
        """See `LaunchedStep.sample`. Does nothing once the step has failed."""
        if self._step is None or self.has_failed:
            return []
        try:
            self._late = self._step.sample(rows)
        except Exception as error:  # noqa: BLE001 - reported by `collect`
            self._error = error
        return self._late

    def collect(self) -> dict[Sequence, SampledToken]:
        """See `LaunchedStep.collect`. A row that cannot be computed comes back with `StepFailed`.

        Raises the step's exception if the engine cannot go on.
        """
        if self._step is not None and not self.has_failed:
            try:
                results = self._step.collect()
            except Exception as error:  # noqa: BLE001 - reported below
                self._error = error
            else:
                self._isolation.record(self.plan)
                return results
        return self._isolation.run_again(self.plan, self._late, self._error)


class StepIsolation:
    """Launches the steps of one runner."""

    def __init__(self, runner: ModelRunner, sampling_rows: Callable[[StepPlan], list[PlannedRow]]) -> None:
        """`sampling_rows`: see `Scheduler.sampling_rows`."""
        self._runner = runner
        self._sampling_rows = sampling_rows
        self._last_good: StepPlan | None = None

    def launch(self, plan: StepPlan, rows: list[PlannedRow] | None) -> IsolatedStep:
        """See `ModelRunner.launch`. Raises nothing."""
        step = IsolatedStep(plan, self)
        step.launch(self._runner, rows)
        return step

    def record(self, plan: StepPlan) -> None:
        """Record that every row of `plan` was computed."""
        self._last_good = plan

    def run_again(
        self, plan: StepPlan, late: Collection[Sequence], error: Exception | None
    ) -> dict[Sequence, SampledToken]:
        """Run the live rows of a failed step in parts and return their results. Those of `late` get no token.

        Rows of the last good step are tried first, apart from new ones. A part that fails is halved. After `RUNS_PER_LEVEL`
        runs per level it is not, and fails as a whole: then many rows fail, most likely those of one tenant.
        """
        self._runner.require_device()
        rows = [row.resolved() for row in plan.rows if row.is_live]
        parts = deque(part for part in self._by_history(rows) if part)
        runs = RUNS_PER_LEVEL * (1 + math.ceil(math.log2(max(len(rows), 1))))
        results: dict[Sequence, SampledToken] = {}
        failed: list[PlannedRow] = []
        while parts:
            part = parts.popleft()
            runs -= 1
            try:
                results |= self._run(part, late)
            except Exception as failure:  # noqa: BLE001 - it belongs to the rows of this part
                self._runner.require_device()
                error = failure
                if len(part) == 1 or runs <= 0:
                    failed += part
                else:
                    parts += _halves(part)
        if len(failed) == len(rows) > 0:
            self._runner.check()
        self._last_good = plan
        names = [row.sequence.request_id for row in failed]
        if names:
            _logger.error("a step failed; requests ended: %s", names, exc_info=error)
        else:
            _logger.warning("a step failed, and succeeded when it was run again", exc_info=error)
        message = "the computation of this request failed"
        return results | {
            row.sequence: SampledToken(-1, finite=False, error=StepFailed(message)) for row in failed
        }

    def _by_history(self, rows: list[PlannedRow]) -> tuple[list[PlannedRow], list[PlannedRow]]:
        known = set() if self._last_good is None else {row.sequence for row in self._last_good.rows}
        return (
            [row for row in rows if row.sequence in known],
            [row for row in rows if row.sequence not in known],
        )

    def _run(self, part: list[PlannedRow], late: Collection[Sequence]) -> dict[Sequence, SampledToken]:
        plan = StepPlan(tuple(part))
        rows = [row for row in self._sampling_rows(plan) if row.sequence not in late]
        step = self._runner.launch(plan, rows)
        step.sample(rows)
        return step.collect()


def _halves(part: list[PlannedRow]) -> tuple[list[PlannedRow], list[PlannedRow]]:
    """Split rows, those of one tenant together as far as possible. Each half is in the order of the plan."""
    by_tenant = sorted(part, key=lambda row: row.sequence.request.namespace)
    first = {row.sequence for row in by_tenant[: len(part) // 2]}
    return (
        [row for row in part if row.sequence in first],
        [row for row in part if row.sequence not in first],
    )
