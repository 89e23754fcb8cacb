"""`AdapterQueue`: the sequences that wait for one adapter. `RankedQueues`: such queues, and which the policy serves first."""

from collections import UserDict
from collections.abc import Collection
from dataclasses import dataclass, field

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.messages import AdapterKey, AdapterRef
from loraplex.engine.scheduling.tenant_order import TenantOrder


def waiting_since(sequence: Sequence) -> float:
    return float("inf") if sequence.adapter_wait_since is None else sequence.adapter_wait_since


@dataclass(slots=True)
class AdapterQueue:
    """The sequences that wait for one adapter, the longest waiting first. Never empty once filled."""

    adapter: AdapterRef
    sequences: dict[Sequence, None] = field(default_factory=dict)
    charged_s: float = 0.0

    def add(self, sequence: Sequence) -> None:
        last = next(reversed(self.sequences), None)
        self.sequences[sequence] = None
        if last is not None and waiting_since(sequence) < waiting_since(last):
            self.sequences = dict.fromkeys(sorted(self.sequences, key=waiting_since))

    @property
    def head(self) -> Sequence:
        return next(iter(self.sequences))


class RankedQueues(UserDict[AdapterKey, AdapterQueue]):
    """Queues by adapter. A changed one is assigned again, so that its head's place in the order is known."""

    def __init__(self, order: TenantOrder) -> None:
        super().__init__()
        self._order = order
        self._heads: dict[AdapterKey, Sequence] = {}

    def __setitem__(self, key: AdapterKey, queue: AdapterQueue) -> None:
        super().__setitem__(key, queue)
        if self._heads.get(key) is not queue.head:
            self._withdraw(key)
            self._heads[key] = queue.head
            self._order.push(queue.head)

    def __delitem__(self, key: AdapterKey) -> None:
        super().__delitem__(key)
        self._withdraw(key)

    def first(self, passed: Collection[bytes] = ()) -> AdapterQueue | None:
        """The queue whose head is served first, but for those of tenants in `passed`."""
        head = self._order.peek(passed)
        return None if head is None or head.adapter is None else self[head.adapter.key]

    def _withdraw(self, key: AdapterKey) -> None:
        head = self._heads.pop(key, None)
        if head is not None:
            self._order.remove(head)
