"""`UnstartedRequests`: the requests that no step has begun, in a bounded queue that tenants share fairly (Longest Queue Drop).

Invariant: at most `max_sequences` sequences wait. When more arrive, the newest requests of the tenant that has the most for
its weight are shed. A tenant with no more than its weighted share of the queue is never refused.
"""

from dataclasses import dataclass, field

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.errors import QueueShareExceeded
from loraplex.engine.messages import EngineRequest


@dataclass(slots=True)
class _TenantRequests:
    """The requests of one tenant, oldest first: one sequence of each. `weight` is that of the newest."""

    weight: float
    num_sequences: int = 0
    requests: dict[str, Sequence] = field(default_factory=dict)

    @property
    def load(self) -> float:
        return self.num_sequences / self.weight


class UnstartedRequests:
    """Counts `n` sequences for a request, which leaves with its first admission to the batch or its end."""

    def __init__(self, max_sequences: int) -> None:
        self._max_sequences = max_sequences
        self._num_sequences = 0
        self._tenants: dict[bytes, _TenantRequests] = {}

    def by_namespace(self) -> dict[bytes, int]:
        """Return the number of requests of each tenant. O(tenants)."""
        return {name: len(queue.requests) for name, queue in self._tenants.items()}

    def make_room(self, request: EngineRequest) -> list[Sequence]:
        """Return one sequence of every request that has to end before `request` is added. O(tenants) for each of them.

        Raises `QueueShareExceeded` if the tenant of `request` would have the most: it has filled its share.
        """
        excess = self._num_sequences + request.sampling.n - self._max_sequences
        if excess <= 0:
            return []
        loads = {name: queue.load for name, queue in self._tenants.items()}
        newest = {name: reversed(queue.requests.values()) for name, queue in self._tenants.items()}
        own = loads.pop(request.namespace, 0.0) + request.sampling.n / request.weight
        shed: list[Sequence] = []
        while excess > 0:
            largest = max(loads, key=loads.__getitem__, default=None)
            if largest is None or loads[largest] <= own:
                raise QueueShareExceeded(
                    f"{self._num_sequences} of at most {self._max_sequences} sequences wait"
                )
            sequence = next(newest[largest])
            shed.append(sequence)
            excess -= sequence.request.sampling.n
            loads[largest] -= sequence.request.sampling.n / self._tenants[largest].weight
        return shed

    def add(self, sequence: Sequence) -> None:
        """Add a request by its first sequence."""
        request = sequence.request
        queue = self._tenants.setdefault(request.namespace, _TenantRequests(request.weight))
        queue.weight = request.weight
        queue.requests[request.request_id] = sequence
        queue.num_sequences += request.sampling.n
        self._num_sequences += request.sampling.n

    def discard(self, request: EngineRequest) -> None:
        """Remove a request that begins or ends. Does nothing when it has left."""
        queue = self._tenants.get(request.namespace)
        if queue is None or queue.requests.pop(request.request_id, None) is None:
            return
        queue.num_sequences -= request.sampling.n
        self._num_sequences -= request.sampling.n
        if not queue.requests:
            del self._tenants[request.namespace]
