"""`InFlightSteps`: the rows of launched steps until their results are followed (the scheduler runs ahead of the device).

Invariant: `num_in_flight` and `num_unknown` of a sequence are what its rows of the current epoch are still to bring; its
adapter stays pinned until the last of its rows has landed. Steps land in the order of their launch.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from loraplex.engine.batch.sequence import Sequence, SequenceStatus
from loraplex.engine.batch.step_plan import PlannedRow, StepPlan


@dataclass(slots=True, eq=False)
class InFlightStep:
    """One launched step. `late`: sequences whose mask did not come, None before that is known."""

    plan: StepPlan
    late: Collection[Sequence] | None = None


class InFlightSteps:
    """At most two: the one that computes and the one that is planned meanwhile."""

    def __init__(self, release_adapter: Callable[[Sequence], None]) -> None:
        """`release_adapter` gives back the pin of one departure."""
        self._release_adapter = release_adapter
        self._steps: deque[InFlightStep] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Take the rows of `plan` for begun."""
        self._steps.append(InFlightStep(plan))
        for row in plan.rows:
            row.sequence.num_in_flight += len(row.token_ids)
            row.sequence.num_launched += 1

    def sampling_rows(self, plan: StepPlan) -> list[PlannedRow]:
        """The rows of `plan` whose logits choose a token, once every earlier step has landed.

        Not those that ended meanwhile, nor those behind whose token a grammar forced others.
        """
        return [
            row
            for row in plan.rows
            if row.samples and is_live(row) and row.stop == len(row.sequence.token_ids)
        ]

    def expect(self, plan: StepPlan, sampled: Collection[Sequence], late: Collection[Sequence]) -> None:
        """The sampling of `plan` has begun: of `sampled` there will be a token, of `late` there was no mask in time."""
        self._of(plan).late = late
        for sequence in sampled:
            sequence.num_unknown = 1
        for sequence in late:
            sequence.num_in_flight -= 1
            sequence.awaits_mask = True

    def complete(self, plan: StepPlan) -> InFlightStep:
        """The results of the step launched first are there. Raises `ValueError` for any other."""
        step = self._of(plan)
        if step is not self._steps[0]:
            raise ValueError("steps are completed in the order in which they were planned")
        return self._steps.popleft()

    def complete_row(self, step: InFlightStep, row: PlannedRow) -> bool:
        """Count what the row computed; False if that is of no use any more."""
        sequence = row.sequence
        sequence.num_launched -= 1
        while sequence.num_departures and not sequence.num_launched:
            sequence.num_departures -= 1
            self._release_adapter(sequence)
        if not is_live(row):
            return False
        computed = len(row.token_ids)
        if step.late and sequence in step.late:
            # Logits that brought no token are gone: the last token is computed again.
            computed -= 1
        sequence.num_in_flight -= computed
        sequence.num_computed_tokens += computed
        sequence.num_unknown = 0
        return True

    def depart(self, sequence: Sequence) -> None:
        """The sequence leaves the batch; its adapter does with the last of its rows."""
        self.forget(sequence)
        if sequence.num_launched:
            sequence.num_departures += 1
        else:
            self._release_adapter(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Whatever launched steps still compute for a sequence is of no use."""
        sequence.epoch += 1
        sequence.num_in_flight = 0
        sequence.num_unknown = 0

    def is_expected(self, plan: StepPlan) -> bool:
        """Whether `expect` was called for this step."""
        return self._of(plan).late is not None

    def _of(self, plan: StepPlan) -> InFlightStep:
        for step in self._steps:
            if step.plan is plan:
                return step
        raise ValueError("the step was not planned here, or has been completed")


def is_live(row: PlannedRow) -> bool:
    """Whether the row's sequence still runs and has not changed its mind since."""
    return row.epoch == row.sequence.epoch and row.sequence.status is SequenceStatus.RUNNING
