"""`WaitingQueue`: sequences outside the batch, each in one of three places: it waits for its mask, its adapter or its turn.

Invariant: a sequence that could not run now never keeps one behind it from running.
"""

import math
from collections.abc import Callable, Collection

from loraplex.engine.batch.sequence import Sequence, SequenceStatus
from loraplex.engine.errors import AdapterError
from loraplex.engine.messages import BatchLimit
from loraplex.engine.scheduling.adapter_scheduler import AdapterScheduler
from loraplex.engine.scheduling.fairness import FairShare

REVIEW_INTERVAL_S = 0.05
"""Between two searches for a tenant that has waited too long for a row: such a search reads the whole queue."""


class WaitingQueue:
    """The queue of a `Scheduler`, which decides what joins the batch; `policy` orders sequences that could run now."""

    def __init__(
        self,
        policy: FairShare,
        adapters: AdapterScheduler,
        max_slot_wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._policy = policy
        self._scoring = policy.new_order()
        self._adapters = adapters
        self._max_slot_wait_s = max_slot_wait_s
        self._clock = clock
        self._causes = QueueCauses(clock)
        self._without_mask: dict[Sequence, None] = {}
        self._next_review = 0.0

    @property
    def num_without_mask(self) -> int:
        """Sequences whose grammar is still being compiled."""
        return len(self._without_mask)

    def put(self, sequence: Sequence) -> None:
        """Queue a new, preempted or woken sequence where it has to wait."""
        sequence.status = SequenceStatus.WAITING
        if sequence.request.grammar is not None and sequence.token_mask is None:
            self._without_mask[sequence] = None
        elif self._adapters.admits(sequence):
            self._push(sequence)
        else:
            self._adapters.queue(sequence)

    def wake(self, num_free: int) -> list[tuple[Sequence, AdapterError]]:
        """Move on the sequences whose mask or adapter has arrived; return those whose adapter failed to load.

        `num_free` is the number of free rows in the batch.
        """
        for sequence in [each for each in self._without_mask if each.token_mask is not None]:
            del self._without_mask[sequence]
            sequence.grammar_s = self._clock() - sequence.arrival
            self.put(sequence)
        ready, failed = self._adapters.advance(num_free)
        for sequence in ready:
            if sequence.adapter_wait_since is not None and sequence.admitted_at is None:
                sequence.adapter_s = self._clock() - sequence.adapter_wait_since
                sequence.note(adapter_bytes=self._adapters.adapter_bytes(sequence))
            sequence.status = SequenceStatus.WAITING
            self._push(sequence)
        return failed

    def next(self, *, scoring: bool = False) -> Sequence | None:
        """The policy's first sequence that could run now; it stays queued. None if there is none.

        `scoring`: the first of those that only score.
        """
        order = self._scoring if scoring else self._policy
        sequence = order.peek()
        while sequence is not None and not self._adapters.admits(sequence):
            self._await_adapter(sequence)
            sequence = order.peek()
        return sequence

    def next_starved(self, served: Collection[bytes]) -> Sequence | None:
        """The policy's first sequence that has waited `max_slot_wait_s` and whose namespace is not `served`.

        It stays queued. None if there is none, and between two reviews. O(queued).
        """
        now = self._clock()
        if now < self._next_review:
            return None
        self._next_review = now + REVIEW_INTERVAL_S
        latest = now - self._max_slot_wait_s
        waiting = (s for s in self._policy if s.queued_at <= latest and s.request.namespace not in served)
        for sequence in sorted(waiting, key=self._policy.rank):
            if self._adapters.admits(sequence):
                return sequence
            self._await_adapter(sequence)
        return None

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out that joins the batch."""
        self._causes.leave(sequence)
        self._remove(sequence)
        sequence.queued_at = math.inf

    def stay(self, limit: BatchLimit | None) -> None:
        """Record that a step is planned without the sequences that are queued now, because of `limit`."""
        self._causes.stopped(limit)

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out that has ended, wherever it waits."""
        self._remove(sequence)
        self._adapters.discard(sequence)
        self._without_mask.pop(sequence, None)

    def _push(self, sequence: Sequence) -> None:
        sequence.queued_at = min(sequence.queued_at, self._clock())
        self._causes.join(sequence, len(self._policy))
        self._policy.push(sequence)
        if not sequence.writes:
            self._scoring.push(sequence)

    def _remove(self, sequence: Sequence) -> None:
        self._policy.remove(sequence)
        self._scoring.remove(sequence)

    def _await_adapter(self, sequence: Sequence) -> None:
        """Let others pass by a queued sequence whose adapter has been evicted or lacks a place in the step."""
        self._remove(sequence)
        self._adapters.queue(sequence)


class QueueCauses:
    """Notes why a sequence waited: at its first place in the queue, and at its first step. A few operations for each."""

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
