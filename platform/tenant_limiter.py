"""Limits how much of one kind of work runs at once, per tenant and in total.

Invariant: a slow or busy tenant waits behind its own work or is refused. It exhausts neither connections, disk nor threads.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final
from uuid import UUID

from loraplex.platform.errors import Overloaded

AT_ONCE: Final = 4
"""Requests of one tenant that use the database, or a thread, at once in one place."""
MAX_WAITING: Final = 64


class TenantLimiter:
    """Slots for one kind of work: `total` for all tenants, `per_tenant` for each; None is no bound.

    Up to `waiting` requests of a tenant wait for a slot, in order of arrival; further ones are refused. Free slots go to the
    waiting tenants in turn. `work` names the work in error messages, in the plural.
    """

    def __init__(
        self, work: str, *, total: int | None = None, per_tenant: int | None = None, waiting: int = 0
    ) -> None:
        self._work = work
        self._total = total
        self._per_tenant = per_tenant
        self._max_waiting = waiting
        self._running: Counter[UUID] = Counter()
        self._waiting: dict[UUID, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def slot(self, tenant_id: UUID) -> AsyncIterator[None]:
        """Take a slot for the block, waiting for it where the limiter allows that. Raises `Overloaded`."""
        if self._max_waiting and (tenant_id in self._waiting or self._refusal(tenant_id, 1) is not None):
            await self._wait(tenant_id)
        else:
            self.acquire(tenant_id)
        try:
            yield
        finally:
            self.release(tenant_id)

    def acquire(self, tenant_id: UUID, count: int = 1) -> None:
        """Take `count` slots without waiting; `release` frees them. Raises `Overloaded`."""
        refusal = self._refusal(tenant_id, count)
        if refusal is not None:
            raise Overloaded(refusal)
        self._running[tenant_id] += count

    def release(self, tenant_id: UUID, count: int = 1) -> None:
        """Free `count` slots."""
        self._running[tenant_id] -= count
        if not self._running[tenant_id]:
            del self._running[tenant_id]
        # Without a bound in total, a slot of one tenant is of use to that tenant only.
        while self._hand_over((tenant_id,) if self._total is None else self._waiting):
            continue

    def _refusal(self, tenant_id: UUID, count: int) -> str | None:
        if self._per_tenant is not None and self._running[tenant_id] + count > self._per_tenant:
            return f"This tenant has {self._per_tenant} {self._work} in progress, the maximum; try again."
        if self._total is not None and self._running.total() + count > self._total:
            return f"The server has as many {self._work} in progress as it can; try again."
        return None

    async def _wait(self, tenant_id: UUID) -> None:
        queue = self._waiting.setdefault(tenant_id, deque())
        if len(queue) >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} {self._work} of this tenant wait already; try again.")
        slot = asyncio.get_running_loop().create_future()
        queue.append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if not slot.cancelled():
                # The slot was handed over before the cancellation arrived.
                self.release(tenant_id)
            elif slot in queue:
                queue.remove(slot)
                if not queue:
                    del self._waiting[tenant_id]
            raise

    def _hand_over(self, tenants: Iterable[UUID]) -> bool:
        """Give one free slot to the first of `tenants` that waits and may have one; it is then the last in turn."""
        for tenant_id in tenants:
            queue = self._waiting.get(tenant_id)
            if queue and self._refusal(tenant_id, 1) is None:
                slot = queue.popleft()
                del self._waiting[tenant_id]
                if queue:
                    self._waiting[tenant_id] = queue
                if not slot.cancelled():
                    self._running[tenant_id] += 1
                    slot.set_result(None)
                return True
        return False
