"""`StepRows`: the rows of a step while it is planned.

Invariant: chunks never exceed what decodes leave of the token budget, and come after every row that decodes: how a row is
computed does not depend on the others.
"""

from collections.abc import Iterable

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.batch.step_plan import UNKNOWN_TOKEN, PlannedRow, StepPlan


class StepRows:
    """Single tokens are added first, then several of a row, in the order in which they are to get their share."""

    def __init__(self, max_tokens: int) -> None:
        self._budget = max_tokens
        self._decodes: list[PlannedRow] = []
        self._chunks: list[PlannedRow] = []

    @property
    def is_full(self) -> bool:
        return self._budget <= 0

    def add_last(self, sequence: Sequence) -> None:
        """The one token that is not computed yet: of the answer, known or not, or the last of a prompt without an answer."""
        start, request = sequence.num_computed_tokens + sequence.num_in_flight, sequence.request
        token = UNKNOWN_TOKEN if sequence.num_unknown else sequence.token_ids[start]
        table = sequence.planned_block_table
        row = PlannedRow(sequence, start, (token,), table, request.adapter, True, sequence.epoch)
        (self._decodes if start >= len(request.prompt_token_ids) else self._chunks).append(row)
        self._budget -= 1

    def add_chunks(self, sequences: Iterable[Sequence]) -> None:
        """For each as many of its uncomputed tokens as fit; nothing for those that come after the budget is spent."""
        for sequence in sequences:
            if self.is_full:
                return
            count = min(self._budget, sequence.num_uncomputed_tokens)
            row = PlannedRow.of(sequence, count)
            (self._decodes if row.decodes else self._chunks).append(row)
            self._budget -= count

    def plan(self) -> StepPlan | None:
        """None when there is no row."""
        rows = (*self._decodes, *self._chunks)
        return StepPlan(rows) if rows else None


def by_urgency(begun: list[Sequence], oldest: Sequence | None) -> list[Sequence]:
    """The oldest first, since it must always progress; then answers with forced tokens, whose readers wait; then prompts."""
    return sorted(begun, key=lambda sequence: sequence is not oldest and not sequence.is_past_prompt)
