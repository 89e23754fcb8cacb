"""`InFlightSteps`: the rows of launched steps until their results are processed (the scheduler runs ahead of the device).

Invariant: `num_in_flight` and `num_unknown` of a sequence are the pending results of its rows in the current epoch. Its
adapter stays pinned until the last of its rows is completed. Steps complete in the order of their launch.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.batch.step_plan import PlannedRow, StepPlan


@dataclass(slots=True, eq=False)
class InFlightStep:
    """One launched step. `late`: sequences whose mask was not ready; None before that is known."""

    plan: StepPlan
    late: Collection[Sequence] | None = None


class InFlightSteps:
    """At most two steps: the one that computes and the one that is planned meanwhile."""

    def __init__(self, release_adapter: Callable[[Sequence], None]) -> None:
        """`release_adapter` unpins the adapter of one departed sequence."""
        self._release_adapter = release_adapter
        self._steps: deque[InFlightStep] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Count the rows of `plan` as launched."""
        self._steps.append(InFlightStep(plan))
        for row in plan.rows:
            row.sequence.num_in_flight += len(row.token_ids)
            row.sequence.num_launched += 1

    def sampling_rows(self, plan: StepPlan) -> list[PlannedRow]:
        """Return the rows of `plan` whose logits choose a token, once every earlier step is completed.

        Excludes rows that ended meanwhile, and rows after whose token a grammar forced others.
        """
        return [
            row
            for row in plan.rows
            if row.samples and row.is_live and row.stop == len(row.sequence.token_ids)
        ]

    def expect(self, plan: StepPlan, sampled: Collection[Sequence], late: Collection[Sequence]) -> None:
        """Record that the sampling of `plan` has started: `sampled` will get a token, the masks of `late` were not ready."""
        self._of(plan).late = late
        for sequence in sampled:
            sequence.num_unknown = 1
        for sequence in late:
            sequence.num_in_flight -= 1
            sequence.awaits_mask = True

    def complete(self, plan: StepPlan) -> InFlightStep:
        """Remove and return the step whose results have arrived: the first launched one. Raises `ValueError` for any
        other.
        """
        step = self._of(plan)
        if step is not self._steps[0]:
            raise ValueError("steps are completed in the order in which they were planned")
        return self._steps.popleft()

    def complete_row(self, step: InFlightStep, row: PlannedRow) -> bool:
        """Count what the row computed; False if its result is not used any more."""
        sequence = row.sequence
        sequence.num_launched -= 1
        while sequence.num_departures and not sequence.num_launched:
            sequence.num_departures -= 1
            self._release_adapter(sequence)
        if not row.is_live:
            return False
        computed = len(row.token_ids)
        if step.late and sequence in step.late:
            # Logits that gave no token are gone: the last token is computed again.
            computed -= 1
        sequence.num_in_flight -= computed
        sequence.num_computed_tokens += computed
        sequence.num_unknown = 0
        return True

    def depart(self, sequence: Sequence) -> None:
        """Drop the sequence's rows as it leaves the batch; its adapter is unpinned with the last of them."""
        self.forget(sequence)
        if sequence.num_launched:
            sequence.num_departures += 1
        else:
            self._release_adapter(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop the results that launched steps still compute for a sequence."""
        sequence.epoch += 1
        sequence.num_in_flight = 0
        sequence.num_unknown = 0

    def is_lost(self, step: InFlightStep, row: PlannedRow) -> bool:
        """Whether a completed row was to choose a token: without one, its logits are gone."""
        is_late = step.late is not None and row.sequence in step.late
        return row.samples and row.stop == len(row.sequence.token_ids) and not is_late

    def is_expected(self, plan: StepPlan) -> bool:
        """Whether `expect` was called for this step."""
        return self._of(plan).late is not None

    def _of(self, plan: StepPlan) -> InFlightStep:
        for step in self._steps:
            if step.plan is plan:
                return step
        raise ValueError("the step was not planned here, or has been completed")
