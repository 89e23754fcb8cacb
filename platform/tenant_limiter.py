"""How much of one kind of work a gateway does at once, in all and for one tenant: no tenant takes disk or threads from the others.

Invariant: nothing waits here; what finds no slot is refused.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from loraplex.platform.errors import Overloaded


class TenantSlots:
    """`most` slots, `most_per_tenant` of them for one tenant; `work` says in the plural what they are for."""

    def __init__(self, most: int, most_per_tenant: int, work: str) -> None:
        self._most = most
        self._most_per_tenant = most_per_tenant
        self._work = work
        self._taken: Counter[UUID] = Counter()

    @contextmanager
    def taken(self, tenant_id: UUID) -> Iterator[None]:
        """Raises `Overloaded`."""
        if self._taken[tenant_id] >= self._most_per_tenant:
            raise Overloaded(
                f"This tenant has {self._most_per_tenant} {self._work} under way, which is the most; try again."
            )
        if self._taken.total() >= self._most:
            raise Overloaded(f"The server has as many {self._work} under way as it can; try again.")
        self._taken[tenant_id] += 1
        try:
            yield
        finally:
            self._taken[tenant_id] -= 1
            self._taken += Counter()
