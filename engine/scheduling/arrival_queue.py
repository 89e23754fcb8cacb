"""`ArrivalQueue`: waiting sequences by submission order, with O(log n) push and O(1) amortised removal from anywhere.

Invariant: a sequence put back (preempted, adapter arrived) regains the place its submission gave it.
"""

import heapq

from loraplex.engine.batch.sequence import Sequence


class ArrivalQueue:
    """A heap with lazy removal."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Sequence]] = []
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._members)

    def push(self, sequence: Sequence) -> None:
        if sequence.order not in self._members:
            self._members.add(sequence.order)
            heapq.heappush(self._heap, (sequence.order, sequence))

    def peek(self) -> Sequence | None:
        """The oldest sequence, or None."""
        heap = self._heap
        while heap and heap[0][0] not in self._members:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; does nothing when it is not queued."""
        self._members.discard(sequence.order)
        if not self._members:
            self._heap.clear()
