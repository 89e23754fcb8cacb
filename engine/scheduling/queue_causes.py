"""`QueueCauses`: why a sequence waited in the queue: how many stood before it, who went first, and what stopped admission.

Invariant: a sequence costs a few operations, however many wait.
"""

from collections.abc import Callable

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.messages import BatchLimit


class QueueCauses:
    """Notes the causes at a sequence's first place in the queue and at its first step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_admitted = 0
        self._limit: BatchLimit | None = None
        self._planned_at = float("-inf")

    def join(self, sequence: Sequence, num_queued: int) -> None:
        """Note that a sequence comes to wait for a row after `num_queued` others. Only the first time counts."""
        if sequence.admitted_when_queued is None:
            sequence.admitted_when_queued = self._num_admitted
            sequence.note(queued_before=num_queued)

    def leave(self, sequence: Sequence) -> None:
        """Note what a sequence has waited for, which joins the batch. Call it before its queue forgets when it came."""
        if sequence.admitted_at is not None:
            return
        passed = self._num_admitted - (sequence.admitted_when_queued or 0)
        self._num_admitted += 1
        if sequence.queued_at <= self._planned_at:
            overtaken_by = max(0, passed - sequence.causes.queued_before)
            sequence.note(limit=self._limit, overtaken_by=overtaken_by)

    def stopped(self, limit: BatchLimit | None) -> None:
        """Note what kept the sequences that are queued now from a step."""
        self._limit = limit
        self._planned_at = self._clock()
