"""Limits how much of one kind of work runs at once, per tenant and in total.

Invariant: a slow or busy tenant waits behind its own work or is refused. It exhausts neither connections, disk nor threads.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Hashable, Iterable
from contextlib import asynccontextmanager
from typing import Final

from loraplex.platform.errors import GatewayError, Overloaded, ShareExceeded

AT_ONCE: Final = 4
"""Requests of one tenant that use the database, or a thread, at once in one place."""
MAX_WAITING: Final = 64


class TenantLimiter:
    """Slots for one kind of work: `total` for all tenants, `per_tenant` for each; None is no bound.

    Up to `waiting` requests of a tenant wait for a slot, in order of arrival, and up to `waiting_in_total` of all; further
    ones are refused. Free slots go to the waiting tenants in turn. `work` names the work in error messages, in the plural,
    and `owner` what has the slots, where these are not tenants.
    """

    def __init__(
        self,
        work: str,
        *,
        owner: str = "tenant",
        total: int | None = None,
        per_tenant: int | None = None,
        waiting: int = 0,
        waiting_in_total: int | None = None,
    ) -> None:
        self._work = work
        self._owner = owner
        self._total = total
        self._per_tenant = per_tenant
        self._max_waiting = waiting
        self._max_waiting_in_total = waiting_in_total
        self._running: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return sum(map(len, self._waiting.values()))

    @property
    def running(self) -> int:
        """Slots in use."""
        return self._running.total()

    @asynccontextmanager
    async def slot(self, tenant_id: Hashable) -> AsyncIterator[None]:
        """Take a slot for the block, waiting for it where the limiter allows that. Raises `ShareExceeded`, `Overloaded`."""
        if self._max_waiting and (tenant_id in self._waiting or self._refusal(tenant_id) is not None):
            await self._wait(tenant_id)
        else:
            self._acquire(tenant_id)
        try:
            yield
        finally:
            self._release(tenant_id)

    def _acquire(self, tenant_id: Hashable) -> None:
        refusal = self._refusal(tenant_id)
        if refusal is not None:
            raise refusal
        self._running[tenant_id] += 1

    def _release(self, tenant_id: Hashable) -> None:
        self._running[tenant_id] -= 1
        if not self._running[tenant_id]:
            del self._running[tenant_id]
        if tenant_id in self._waiting:
            # It has just had a slot: every other waiting tenant is before it.
            self._waiting[tenant_id] = self._waiting.pop(tenant_id)
        # Without a bound in total, a slot of one tenant is of use to that tenant only.
        while self._hand_over((tenant_id,) if self._total is None else self._waiting):
            continue

    def _refusal(self, tenant_id: Hashable) -> GatewayError | None:
        if self._per_tenant is not None and self._running[tenant_id] >= self._per_tenant:
            return self._share_exceeded(
                f"This {self._owner} has {self._per_tenant} {self._work} in progress, the maximum; try again."
            )
        if self._is_full():
            return Overloaded(f"The server has as many {self._work} in progress as it can; try again.")
        return None

    def _share_exceeded(self, message: str) -> ShareExceeded:
        return ShareExceeded(message, limit=self._work.replace(" ", "_"), level=self._owner)

    def _is_full(self) -> bool:
        return self._total is not None and self._running.total() >= self._total

    async def _wait(self, tenant_id: Hashable) -> None:
        if len(self._waiting.get(tenant_id, ())) >= self._max_waiting:
            raise self._share_exceeded(
                f"{self._max_waiting} {self._work} of this {self._owner} wait already; try again."
            )
        if self._max_waiting_in_total is not None and self.waiting >= self._max_waiting_in_total:
            raise Overloaded(f"{self._max_waiting_in_total} {self._work} wait already; try again.")
        queue = self._waiting.setdefault(tenant_id, deque())
        slot = asyncio.get_running_loop().create_future()
        queue.append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if not slot.cancelled():
                # The slot was handed over before the cancellation arrived.
                self._release(tenant_id)
            elif slot in queue:
                queue.remove(slot)
                if not queue:
                    del self._waiting[tenant_id]
            raise

    def _hand_over(self, tenants: Iterable[Hashable]) -> bool:
        """Give one free slot to the first of `tenants` that waits and may have one; it is then the last in turn."""
        if self._is_full():
            return False
        for tenant_id in tenants:
            queue = self._waiting.get(tenant_id)
            if queue and self._refusal(tenant_id) is None:
                slot = queue.popleft()
                del self._waiting[tenant_id]
                if queue:
                    self._waiting[tenant_id] = queue
                if not slot.cancelled():
                    self._running[tenant_id] += 1
                    slot.set_result(None)
                return True
        return False
