"""A fair queue: tenants in turn, each tenant's items in order.

Invariant: a tenant's running items stay within its share. While another tenant waits, it starts at most one before
that tenant's next item.
"""

from collections import Counter, OrderedDict, deque
from typing import Generic, Protocol, TypeVar


class OwnedByTenant(Protocol):
    @property
    def namespace(self) -> bytes: ...


Waiting = TypeVar("Waiting", bound=OwnedByTenant)


class TenantFairQueue(Generic[Waiting]):
    """Round-robin among tenants. `take` starts one, `done` ends it."""

    def __init__(self, concurrent: int, concurrent_per_tenant: int) -> None:
        self._concurrent = concurrent
        self._concurrent_per_tenant = concurrent_per_tenant
        self._tenants: OrderedDict[bytes, deque[Waiting]] = OrderedDict()
        self._running: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def waiting(self, namespace: bytes) -> int:
        """Return how many items of this tenant wait."""
        return len(self._tenants.get(namespace, ()))

    def put(self, item: Waiting) -> None:
        """Add an item at the end of its tenant's line."""
        self._tenants.setdefault(item.namespace, deque()).append(item)

    def put_back(self, item: Waiting) -> None:
        """Return a taken item that could not be finished to the front of its line."""
        self.done(item.namespace)
        self._tenants.setdefault(item.namespace, deque()).appendleft(item)

    def remove(self, item: Waiting) -> None:
        """Remove a waiting item. Raises ValueError when it does not wait."""
        line = self._tenants.get(item.namespace, deque())
        line.remove(item)
        if not line:
            self._tenants.pop(item.namespace)

    def take(self) -> Waiting | None:
        """Return the next item to start, None when none may start."""
        if self._running.total() >= self._concurrent:
            return None
        for namespace, line in self._tenants.items():
            if self._running[namespace] < self._concurrent_per_tenant:
                break
        else:
            return None
        item = line.popleft()
        self._tenants.move_to_end(namespace)
        if not line:
            del self._tenants[namespace]
        self._running[namespace] += 1
        return item

    def done(self, namespace: bytes) -> None:
        """Record that a taken item has ended."""
        self._running[namespace] -= 1
        if self._running[namespace] == 0:
            del self._running[namespace]
