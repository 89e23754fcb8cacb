"""`ArrivalQueue` and `TenantOrder`: which of many sequences is next, by submission or by counters of their tenants.

Invariant: nothing is looked at for a sequence that is not next, however many there are.
"""

import heapq
from collections.abc import Callable, Collection, Iterator
from typing import TypeAlias

from loraplex.engine.batch.sequence import Sequence


class ArrivalQueue:
    """A heap with lazy removal."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Sequence]] = []
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for order, sequence in self._heap if order in self._members)

    def push(self, sequence: Sequence) -> None:
        if sequence.order not in self._members:
            self._members.add(sequence.order)
            heapq.heappush(self._heap, (sequence.order, sequence))

    def peek(self) -> Sequence | None:
        """The oldest sequence."""
        heap = self._heap
        while heap and heap[0][0] not in self._members:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; does nothing when it is not queued."""
        self._members.discard(sequence.order)
        if not self._members:
            self._heap.clear()


_Place: TypeAlias = tuple[float, int, bytes]
"""A tenant's counter, the order of its oldest sequence, its namespace."""

_LIFTED = float("-inf")
"""Stands in a place for a counter that is the floor, whatever that is by now."""


class TenantOrder:
    """The oldest sequence of the tenant with the smallest counter is next; the oldest of all where counters are equal.

    `counter` lifts those of idle tenants to a `floor` that never falls. Each tenant's entry stands where its place is or
    was before, and is checked again only when it comes up: amortised O(log tenants) for each charge. Lifted tenants rise
    together and keep their entries. A counter that falls is reported by `rise`.
    """

    def __init__(self, counter: Callable[[bytes], float], floor: Callable[[], float]) -> None:
        self._counter = counter
        self._floor = floor
        self._queues: dict[bytes, ArrivalQueue] = {}
        self._entry_of: dict[bytes, _Place] = {}
        self._lifted: list[_Place] = []
        self._above: list[_Place] = []

    def push(self, sequence: Sequence) -> None:
        namespace = sequence.request.namespace
        self._queues.setdefault(namespace, ArrivalQueue()).push(sequence)
        self.rise(namespace)

    def peek(self, passed: Collection[bytes] = ()) -> Sequence | None:
        """The next sequence of tenants that are not in `passed`, or None."""
        head: Sequence | None = None
        held: list[_Place] = []
        while head is None and (heap := self._first_heap()):
            entry = heap[0]
            candidate = self._head(entry[2])
            place = None if candidate is None else self._place(candidate)
            if place is None or self._entry_of[entry[2]] is not entry:
                heapq.heappop(heap)
            elif place != entry:
                heapq.heappop(heap)
                self._enter(place)
            elif entry[2] in passed:
                held.append(heapq.heappop(heap))
            else:
                head = candidate
        for entry in held:
            self._enter(entry)
        return head

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; does nothing when it is not there."""
        namespace = sequence.request.namespace
        queue = self._queues.get(namespace)
        if queue is None:
            return
        queue.remove(sequence)
        if not len(queue):
            del self._queues[namespace], self._entry_of[namespace]

    def rise(self, namespace: bytes) -> None:
        """Put a tenant forward whose counter has fallen, or whose oldest sequence is a new one."""
        head = self._head(namespace)
        if head is None:
            return
        place, entry = self._place(head), self._entry_of.get(namespace)
        # A lifted entry may stand before a place by its counter and still come up after it, once the floor is that counter.
        if entry is None or head.order < entry[1] or self._now(place) < self._now(entry):
            self._enter(place)

    def rise_all(self) -> None:
        """Put every tenant forward whose counter has fallen. O(tenants)."""
        for namespace in self._queues:
            self.rise(namespace)

    def _head(self, namespace: bytes) -> Sequence | None:
        queue = self._queues.get(namespace)
        return None if queue is None else queue.peek()

    def _place(self, head: Sequence) -> _Place:
        namespace = head.request.namespace
        counter = self._counter(namespace)
        return (_LIFTED if counter == self._floor() else counter, head.order, namespace)

    def _now(self, entry: _Place) -> _Place:
        return (self._floor(), *entry[1:]) if entry[0] == _LIFTED else entry

    def _enter(self, place: _Place) -> None:
        self._entry_of[place[2]] = place
        heapq.heappush(self._lifted if place[0] == _LIFTED else self._above, place)

    def _first_heap(self) -> list[_Place]:
        if not (self._lifted and self._above):
            return self._lifted or self._above
        return self._lifted if self._now(self._lifted[0]) < self._above[0] else self._above
