"""`TenantQueue`: a queue in which tenants take turns, so that one tenant's items delay those of others by one item each.

Invariant: the items of one tenant leave in the order of their arrival. Callers provide the locking.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class TenantQueue(Generic[Item]):
    """Items by the cache namespace of their tenant."""

    def __init__(self) -> None:
        self._queues: OrderedDict[bytes, deque[Item]] = OrderedDict()

    def __bool__(self) -> bool:
        """Whether an item waits."""
        return bool(self._queues)

    def put(self, namespace: bytes, item: Item) -> None:
        """Add an item. A tenant that has none yet comes after all others."""
        self._queues.setdefault(namespace, deque()).append(item)

    def pop(self) -> Item:
        """Remove and return the oldest item of the tenant whose turn it is. Raises `KeyError` without one."""
        namespace, queue = self._queues.popitem(last=False)
        item = queue.popleft()
        if queue:
            self._queues[namespace] = queue
        return item

    def discard(self, is_discarded: Callable[[Item], bool]) -> None:
        """Remove items. O(items)."""
        for namespace, queue in list(self._queues.items()):
            kept = deque(item for item in queue if not is_discarded(item))
            if kept:
                self._queues[namespace] = kept
            else:
                del self._queues[namespace]
