"""`FairShare`: the order of waiting sequences, by fair shares by Virtual Token Counters (Sheng et al., OSDI 2024).

Invariant: it orders sequences and counts service, and never decides whether one fits. A sequence that returns to the
queue (preempted, adapter loaded) regains the place its submission gave it.
"""

import heapq
from collections.abc import Iterator
from itertools import chain
from typing import TypeAlias

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.scheduling.tenant_order import ArrivalQueue, TenantOrder

_Place: TypeAlias = tuple[float, int, bytes]
"""A tenant's counter, its head's order, its namespace."""


class FairShare:
    """One counter of weighted service per tenant; the queued tenant with the smallest counter is next.

    A tenant whose queue was empty is lifted to `credit` below the virtual time, the smallest counter of the queued ones:
    what it left unused of its share stays its own, up to `credit`. While no tenant queues, the counter of the last one that
    did is the virtual time. While a tenant queues, each other one gets at most `credit` more weighted service than it,
    however often that one returns, plus what the rows of both and one admission are served beyond their admission. Costs
    are in prompt tokens, divided by `EngineRequest.weight`; a second of loading costs by default what a mid-sized model
    prefills in it.
    """

    def __init__(
        self,
        *,
        prompt_cost: float = 1.0,
        output_cost: float = 2.0,
        load_second_cost: float = 4096.0,
        credit: float = 4096.0,
    ) -> None:
        self._credit = credit
        self._prompt_cost = prompt_cost
        self._output_cost = output_cost
        self._load_second_cost = load_second_cost
        self._counters: dict[bytes, float] = {}
        self._queues: dict[bytes, ArrivalQueue] = {}
        self._places: list[_Place] = []
        self._place_of: dict[bytes, _Place] = {}
        self._orders: list[TenantOrder] = []
        self._virtual_time = credit
        self._last_left = b""
        self._num_queued = 0
        self._prune_at = 4096

    def __len__(self) -> int:
        return self._num_queued

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._queues.values())

    def counter(self, namespace: bytes) -> float:
        """Weighted service that a tenant has received, lifted when it was idle."""
        earliest = self._earliest()
        counter = self._counters.get(namespace, earliest)
        return counter if namespace in self._queues else max(counter, earliest)

    def push(self, sequence: Sequence) -> None:
        namespace = sequence.request.namespace
        queue = self._queues.get(namespace)
        if queue is None:
            self._advance()
            self._counters[namespace] = self.counter(namespace)
            queue = self._queues[namespace] = ArrivalQueue()
            self._prune()
        before = len(queue)
        queue.push(sequence)
        self._num_queued += len(queue) - before
        self._rise(namespace)

    def peek(self) -> Sequence | None:
        """Return the next sequence. Amortised O(log tenants): a heap entry is checked again only when it comes up."""
        while self._places:
            place = self._places[0]
            namespace = place[2]
            head = self._queues[namespace].peek() if namespace in self._queues else None
            if head is None or self._place_of.get(namespace) is not place:
                heapq.heappop(self._places)
                continue
            counter = self._counters[namespace]
            if (counter, head.order) == place[:2]:
                return head
            self._place_of[namespace] = (counter, head.order, namespace)
            heapq.heapreplace(self._places, self._place_of[namespace])
        return None

    def remove(self, sequence: Sequence) -> None:
        namespace = sequence.request.namespace
        queue = self._queues.get(namespace)
        if queue is None:
            return
        before = len(queue)
        queue.remove(sequence)
        self._num_queued -= before - len(queue)
        if not len(queue):
            del self._queues[namespace], self._place_of[namespace]
            if not self._queues:
                self._last_left = namespace

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        return (self.counter(sequence.request.namespace), sequence.order)

    def is_owed(self, sequence: Sequence, other: Sequence) -> bool:
        """True while more than half of the credit is left over `other`: tenants that are both behind never trade rows."""
        lead = self.counter(other.request.namespace) - self.counter(sequence.request.namespace)
        return lead > self._credit / 2

    def new_order(self) -> TenantOrder:
        """Return an order for sequences outside of this queue."""
        order = TenantOrder(self.counter, self._earliest)
        self._orders.append(order)
        return order

    def charge_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        self._charge(sequence, self._prompt_cost * num_tokens)

    def charge_output(self, sequence: Sequence, num_tokens: int) -> None:
        self._charge(sequence, self._output_cost * num_tokens)

    def charge_adapter_load(self, sequence: Sequence, seconds: float) -> None:
        self._advance()  # An idle tenant pays from where it returns, or its return would lift it past the charge.
        self._charge(sequence, self._load_second_cost * seconds)

    def _charge(self, sequence: Sequence, cost: float) -> None:
        request = sequence.request
        self._counters[request.namespace] = self.counter(request.namespace) + cost / request.weight
        if cost < 0:
            self._rise(request.namespace)
            for order in self._orders:
                order.rise(request.namespace)

    def _earliest(self) -> float:
        """Return the counter of a tenant with its whole credit, the lowest that one returns with."""
        return self._virtual_time - self._credit

    def _rise(self, namespace: bytes) -> None:
        """Add a heap entry for a tenant that comes up before its old entry. A later place needs no entry."""
        queue = self._queues.get(namespace)
        head = None if queue is None else queue.peek()
        if head is None:
            return
        place = (self._counters[namespace], head.order, namespace)
        noted = self._place_of.get(namespace)
        if noted is None or place < noted:
            self._place_of[namespace] = place
            heapq.heappush(self._places, place)

    def _advance(self) -> None:
        """Move the virtual time to the smallest counter of the tenants that queue; it never goes back."""
        head = self.peek()
        namespace = self._last_left if head is None else head.request.namespace
        self._virtual_time = max(self._virtual_time, self._counters.get(namespace, 0.0))

    def _prune(self) -> None:
        """Forget idle tenants behind the virtual time, which get their whole credit again; bounds memory."""
        if len(self._counters) < self._prune_at:
            return
        self._counters = {
            namespace: counter
            for namespace, counter in self._counters.items()
            if counter > self._virtual_time or namespace in self._queues
        }
        self._prune_at = max(4096, 2 * len(self._counters))
        for order in self._orders:
            order.rise_all()
