"""`StepRows`: the rows of a step while it is planned. Invariant: chunks never exceed what decodes leave of the token budget."""

from collections.abc import Iterable

from loraplex.engine.plan import PlannedRow, StepPlan
from loraplex.engine.sequence import Sequence


class StepRows:
    """Decodes are added first, then chunks, in the order in which they are to get their share."""

    def __init__(self, max_tokens: int) -> None:
        self._budget = max_tokens
        self._rows: list[PlannedRow] = []
        self._prompts: list[PlannedRow] = []

    @property
    def is_full(self) -> bool:
        return self._budget <= 0

    def add_decode(self, sequence: Sequence) -> None:
        """The one token that is not computed yet."""
        start = sequence.num_computed_tokens
        token, table = sequence.token_ids[start], sequence.planned_block_table
        self._rows.append(PlannedRow(sequence, start, (token,), table, sequence.request.adapter, True))
        self._budget -= 1

    def add_chunks(self, sequences: Iterable[Sequence]) -> None:
        """For each as many of its uncomputed tokens as fit; nothing for those that come after the budget is spent."""
        for sequence in sequences:
            if self.is_full:
                return
            count = min(self._budget, sequence.num_uncomputed_tokens)
            rows = self._rows if sequence.is_past_prompt else self._prompts
            rows.append(PlannedRow.of(sequence, count))
            self._budget -= count

    def plan(self) -> StepPlan | None:
        """Answers first, prompts after them. None when there is no row."""
        rows = (*self._rows, *self._prompts)
        return StepPlan(rows) if rows else None


def by_urgency(begun: list[Sequence], oldest: Sequence | None) -> list[Sequence]:
    """The oldest first, since it must always progress; then answers with forced tokens, whose readers wait; then prompts."""
    return sorted(begun, key=lambda sequence: sequence is not oldest and not sequence.is_past_prompt)
