"""`AdapterScheduler`: which adapters may be in the batch, which are loaded next, and which sequences wait for them.

Invariant: at most `max_adapters_per_step` adapters run, each pinned once per running sequence, and from its arrival until its
first sequence runs. An adapter that has waited longer than `max_adapter_wait_s` is next: no other adapter loads, and running
ones are drained one by one until it fits.
"""

import heapq
import math
from collections.abc import Callable, Iterable, MutableMapping

from loraplex.engine.batch.sequence import Sequence, SequenceStatus
from loraplex.engine.config import SchedulerConfig
from loraplex.engine.errors import AdapterError
from loraplex.engine.lora.residency import AdapterResidency, AdapterState
from loraplex.engine.messages import AdapterKey, AdapterRef
from loraplex.engine.scheduling.adapter_queues import AdapterQueue, RankedQueues, waiting_since
from loraplex.engine.scheduling.fairness import FairShare

MIN_AHEAD = 4
AHEAD_SHARE = 8
"""Adapters that may be loaded although no sequence slot is free for them yet: an eighth of those of a step. Rows end a few
per step, so more loads would only evict adapters that other sequences return to."""

LOADS_PER_REVIEW = 8
REVIEW_INTERVAL_S = 0.05


class AdapterScheduler:
    """Sequences without an adapter always pass. `max_adapter_wait_s` bounds the wait for a place among the adapters (plus
    the drain of one running batch); the policy then shares out the compute.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        residency: AdapterResidency,
        policy: FairShare,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._residency = residency
        self._policy = policy
        self._clock = clock
        self._running: dict[AdapterKey, int] = {}
        self._absent = RankedQueues(policy.new_order())
        self._loading: dict[AdapterKey, AdapterQueue] = {}
        self._resident: dict[AdapterKey, AdapterQueue] = {}
        self._arrived: dict[AdapterKey, Sequence] = {}
        self._without_room: Sequence | None = None
        self._overdue: Sequence | None = None
        self._overdue_pin: AdapterRef | None = None
        self._draining: set[AdapterKey] = set()
        self._changed = False
        self._next_review = 0.0
        self._ahead = max(MIN_AHEAD, config.max_adapters_per_step // AHEAD_SHARE)
        self._wait_order: list[tuple[float, int, Sequence]] = []

    @property
    def num_queued(self) -> int:
        queues = (self._absent, self._loading, self._resident)
        return sum(len(queue.sequences) for group in queues for queue in group.values())

    @property
    def running_digests(self) -> list[str]:
        return [digest for _, digest in self._running]

    def admits(self, sequence: Sequence) -> bool:
        """Whether the sequence could run now: adapter resident, within the cap, not drained."""
        adapter = sequence.adapter
        if adapter is None:
            return True
        return (
            self._has_room(sequence, adapter.key) and self._residency.state(adapter) is AdapterState.RESIDENT
        )

    def adapter_bytes(self, sequence: Sequence) -> int:
        """Size of the adapter of a sequence; 0 if it is unknown, or without an adapter."""
        return 0 if sequence.adapter is None else self._residency.size_bytes(sequence.adapter)

    def activate(self, sequence: Sequence) -> None:
        """Count and pin the adapter of a sequence that joins the batch."""
        adapter = sequence.adapter
        if adapter is None:
            return
        self._residency.pin(adapter)
        self._running[adapter.key] = self._running.get(adapter.key, 0) + 1
        sequence.adapter_wait_since = None
        self._forget(sequence)

    def deactivate(self, sequence: Sequence) -> None:
        """Undo `activate` when the sequence ends or is preempted."""
        adapter = sequence.adapter
        if adapter is None:
            return
        self._residency.unpin(adapter)
        self._running[adapter.key] -= 1
        if not self._running[adapter.key]:
            del self._running[adapter.key]
        self._changed = True

    def queue(self, sequence: Sequence) -> None:
        """Queue a sequence that is not admitted for its adapter, so that others pass by it."""
        adapter = sequence.adapter
        if adapter is None:
            raise ValueError("a sequence without an adapter never waits for one")
        if sequence.adapter_wait_since is None:
            sequence.adapter_wait_since = self._clock()
            others = len(self._loading) - (adapter.key in self._loading)
            sequence.note(adapter_tier=self._residency.tier(adapter), loads_before=others)
            heapq.heappush(self._wait_order, (sequence.adapter_wait_since, sequence.order, sequence))
        sequence.status = SequenceStatus.LOADING
        self._leave_arrived(adapter.key)
        group = self._group(adapter)
        queue = group.get(adapter.key)
        if queue is None:
            queue = AdapterQueue(adapter)
            self._changed = True
        queue.add(sequence)
        group[adapter.key] = queue

    def discard(self, sequence: Sequence) -> None:
        """Forget a waiting sequence that ended."""
        adapter = sequence.adapter
        if adapter is None:
            return
        for group in (self._absent, self._loading, self._resident):
            queue = group.get(adapter.key)
            if queue is not None and sequence in queue.sequences:
                del queue.sequences[sequence]
                if queue.sequences:
                    group[adapter.key] = queue
                else:
                    del group[adapter.key]
                    self._residency.abandon(adapter)
        self._forget(sequence)

    def advance(self, free_slots: int) -> tuple[list[Sequence], list[tuple[Sequence, AdapterError]]]:
        """Check loads and start new ones; return the sequences that may queue again, and those that failed with their
        errors.
        """
        ready: list[Sequence] = []
        failed = self._check_loads()
        now = self._clock()
        if self._changed or now >= self._next_review:
            self._changed = False
            self._next_review = now + REVIEW_INTERVAL_S
            self._choose_overdue(now)
            # First, since a load may evict what has just arrived: its sequences have then begun to wait for a slot.
            ready = self._take_ready()
            self._start_loads(free_slots)
            self._without_room = self._first_without_room()
        return ready, failed

    def take_without_room(self) -> Sequence | None:
        """Return the policy's first sequence whose adapter found no room in the last review; None once it was taken.

        None, too, where adapters that arrived for sequences after it give their room back: it may be enough.
        """
        sequence, self._without_room = self._without_room, None
        if sequence is None:
            return None
        rank = self._policy.rank(sequence)
        later = [key for key, head in self._arrived.items() if self._policy.rank(head) > rank]
        for key in later:
            self._leave_arrived(key)
        return None if later else sequence

    def num_coming(self, namespace: bytes) -> int:
        """Adapters of a tenant that load with room or have arrived, and whose sequences do not run yet."""
        loading = (q.adapter for k, q in self._loading.items() if k[0] == namespace)
        arrived = sum(key[0] == namespace and key not in self._running for key in self._arrived)
        return arrived + sum(not self._residency.lacks_room(adapter) for adapter in loading)

    def place(self, sequence: Sequence) -> None:
        """Let the adapter of a sequence have the room that was just freed."""
        if sequence.adapter is not None:
            self._residency.place(sequence.adapter)
        self._changed = True

    def _has_room(self, sequence: Sequence, key: AdapterKey) -> bool:
        if key in self._draining:
            return False
        if key in self._running:
            return True
        reserved = 0
        if self._overdue is not None and self._overdue_key() != key and not self._passes_overdue(sequence):
            if self._overdue_lacks_room():
                return False
            reserved = self._overdue_key() not in self._running
        return len(self._running) + reserved < self._config.max_adapters_per_step

    def _passes_overdue(self, sequence: Sequence) -> bool:
        """Whether the tenant of a sequence was served less than that of the overdue adapter, whose wait is its own backlog."""
        overdue = self._overdue
        return overdue is not None and self._policy.rank(sequence)[0] < self._policy.rank(overdue)[0]

    def _group(self, adapter: AdapterRef) -> MutableMapping[AdapterKey, AdapterQueue]:
        for group in (self._absent, self._loading, self._resident):
            if adapter.key in group:
                return group
        state = self._residency.state(adapter)
        if state is AdapterState.RESIDENT:
            return self._resident
        return self._absent if state is AdapterState.ABSENT else self._loading

    def _check_loads(self) -> list[tuple[Sequence, AdapterError]]:
        failed: list[tuple[Sequence, AdapterError]] = []
        for key, queue in list(self._loading.items()):
            state = self._residency.state(queue.adapter)
            if state is AdapterState.LOADING:
                continue
            del self._loading[key]
            self._changed = True
            if state is AdapterState.ABSENT:
                self._absent[key] = queue
            elif state is AdapterState.RESIDENT:
                self._settle(queue)
                self._pin_if_overdue(queue.adapter)
                self._resident[key] = queue
            else:
                error = self._residency.take_error(queue.adapter)
                failed += [(sequence, error) for sequence in queue.sequences]
        return failed

    def _start_loads(self, free_slots: int) -> None:
        """Start loads in the order of the policy; that of an overdue adapter comes before those of tenants served no less.

        Where few tenants fill what may be ahead, the policy's first one starts one more if it has none coming.
        """
        room = min(free_slots + self._ahead - len(self._loading) - len(self._arrived), LOADS_PER_REVIEW)
        if room < 1 and (first := self._absent.first()) is not None:
            coming = {namespace for namespace, _ in (*self._loading, *self._arrived)}
            room = int(first.adapter.namespace not in coming and len(coming) < self._ahead)
        started: list[AdapterQueue] = []
        overdue = self._overdue
        if overdue is not None and self._overdue_key() not in self._resident:
            self._load_first(room, started, before=self._policy.rank(overdue)[0])
            key = self._overdue_key()
            queue = self._absent.get(key)
            if queue is not None and self._load(queue):
                started.append(queue)
            if self._overdue_lacks_room():
                for arrived in [each for each in self._arrived if each != key]:
                    self._leave_arrived(arrived)
                self._drain_one_more()
            if key not in self._absent and key not in self._loading:
                self._load_first(room, started)
        else:
            self._load_first(room, started)
        # Charged after all are chosen: what a tenant pays for one load does not put its next one behind those of others.
        for queue in started:
            self._policy.charge_adapter_load(queue.head, queue.charged_s)

    def _load_first(self, room: int, started: list[AdapterQueue], before: float = math.inf) -> None:
        """Start the first loads of tenants whose counters are below `before`, until `room` are started.

        A tenant whose load is refused is passed by; after `LOADS_PER_REVIEW` of them the others wait for the next review.
        """
        passed: set[bytes] = set()
        while len(started) < room and len(passed) < LOADS_PER_REVIEW:
            queue = self._absent.first(passed)
            if queue is None or self._policy.rank(queue.head)[0] >= before:
                return
            if self._load(queue):
                started.append(queue)
            else:
                passed.add(queue.head.request.namespace)

    def _load(self, queue: AdapterQueue) -> bool:
        """Start to load an absent adapter; False when no more loads may start. The caller charges `charged_s`."""
        if not self._residency.prefetch(queue.adapter):
            return False
        queue.charged_s = self._residency.load_seconds(queue.adapter)
        self._loading[queue.adapter.key] = self._absent.pop(queue.adapter.key)
        return True

    def _settle(self, queue: AdapterQueue) -> None:
        """Charge the difference between a load's measured and expected time; a negative difference is given back."""
        took = self._residency.load_seconds(queue.adapter)
        self._policy.charge_adapter_load(queue.head, took - queue.charged_s)

    def _take_ready(self) -> list[Sequence]:
        """Remove and return the sequences whose adapters have room to run, in the order of the policy."""
        if not self._resident:
            return []
        ready: list[Sequence] = []
        overdue = None if self._overdue is None else self._overdue_key()
        free = self._config.max_adapters_per_step - len(self._running)
        order = sorted(
            self._resident, key=lambda key: (key != overdue, *self._policy.rank(self._resident[key].head))
        )
        for key in order:
            queue = self._resident[key]
            if key not in self._running and free <= 0 or not self._has_room(queue.head, key):
                continue
            del self._resident[key]
            state = self._residency.state(queue.adapter)
            if state is not AdapterState.RESIDENT:
                (self._absent if state is AdapterState.ABSENT else self._loading)[key] = queue
                self._changed = True
                continue
            free -= key not in self._running
            self._leave_arrived(key)
            self._arrived[key] = queue.head
            self._residency.pin(queue.adapter)
            ready += queue.sequences
        if overdue is not None and overdue in self._resident:
            self._drain_one_more()
        return ready

    def _choose_overdue(self, now: float) -> None:
        """Choose the adapter that gets precedence: of those that wait too long, the first by policy."""
        if self._overdue is not None:
            return
        bound = now - self._config.max_adapter_wait_s
        if not self._oldest_wait() < bound:
            return
        late = [head for head in self._waiting_heads() if waiting_since(head) < bound]
        if late:
            self._overdue = min(late, key=self._policy.rank)
            adapter = self._overdue.adapter
            if adapter is not None and adapter.key in self._resident:
                self._pin_if_overdue(adapter)

    def _oldest_wait(self) -> float:
        """Return the start of the longest wait that has not ended. Amortised O(log waiting)."""
        while self._wait_order:
            since, _, sequence = self._wait_order[0]
            if sequence.adapter_wait_since == since and sequence.status is not SequenceStatus.FINISHED:
                return since
            heapq.heappop(self._wait_order)
        return float("inf")

    def _first_without_room(self) -> Sequence | None:
        """Return the policy's first of the sequences whose adapters lack a place in the step, or room on the device."""
        loading = self._loading.values()
        heads = [queue.head for queue in loading if self._residency.lacks_room(queue.adapter)]
        heads += [queue.head for queue in self._resident.values()]
        return min(heads, key=self._policy.rank, default=None)

    def _waiting_heads(self) -> Iterable[Sequence]:
        for group in (self._absent, self._loading, self._resident):
            for queue in group.values():
                yield queue.head

    def _overdue_lacks_room(self) -> bool:
        """Whether pinned adapters leave no room on the device for the overdue adapter, or for one that was read before it: what
        waits for room can keep it from being read.
        """
        overdue = self._overdue_key()
        if overdue not in self._loading:
            return overdue in self._absent
        for key, queue in self._loading.items():
            if self._residency.lacks_room(queue.adapter):
                return True
            if key == overdue:
                break
        return False

    def _pin_if_overdue(self, adapter: AdapterRef) -> None:
        """Pin the overdue adapter until its sequence runs, so that no other load evicts it again."""
        if self._overdue is None or self._overdue_pin is not None or self._overdue_key() != adapter.key:
            return
        if self._residency.state(adapter) is AdapterState.RESIDENT:
            self._residency.pin(adapter)
            self._overdue_pin = adapter

    def _drain_one_more(self) -> None:
        """Close the longest running adapter to new sequences, once those closed before have ended: one of the overdue adapter's
        tenant, where it runs any.
        """
        if any(key in self._draining for key in self._running):
            return
        own = self._overdue_key()
        others = [key for key in self._running if key != own]
        others.sort(key=lambda key: key[0] != own[0])
        self._draining.update(others[:1])

    def _forget(self, sequence: Sequence) -> None:
        adapter = sequence.adapter
        if adapter is not None and self._arrived.get(adapter.key) is sequence:
            self._leave_arrived(adapter.key)
        if self._overdue is sequence:
            self._release_overdue()
        self._changed = True

    def _leave_arrived(self, key: AdapterKey) -> None:
        """Unpin an adapter that arrived, since its sequence runs, waits again or has ended."""
        head = self._arrived.pop(key, None)
        if head is not None and head.adapter is not None:
            self._residency.unpin(head.adapter)

    def _release_overdue(self) -> None:
        self._overdue = None
        self._draining.clear()
        if self._overdue_pin is not None:
            self._residency.unpin(self._overdue_pin)
            self._overdue_pin = None

    def _overdue_key(self) -> AdapterKey:
        if self._overdue is None or self._overdue.adapter is None:
            raise ValueError("no adapter is overdue")
        return self._overdue.adapter.key
