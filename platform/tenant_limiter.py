"""Concurrency limits per tenant and in total: `WaitingTenantLimiter` queues a tenant's transactions, `RefusingTenantLimiter` refuses what finds no slot.

Invariant: a slow or busy tenant queues behind itself or is refused; it exhausts neither the connection pool, disk nor threads.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from loraplex.platform.errors import Overloaded

AT_ONCE: Final = 4
MAX_WAITING: Final = 64


@dataclass(slots=True)
class _Turn:
    """One tenant's; `users` have it or wait for it."""

    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    users: int = 0


class WaitingTenantLimiter:
    """Of all tenants that have a request here."""

    def __init__(self) -> None:
        self._turns: dict[UUID, _Turn] = {}

    @asynccontextmanager
    async def taken(self, tenant_id: UUID) -> AsyncIterator[None]:
        """Waits for one of the tenant's `AT_ONCE` turns. Raises `Overloaded` when `MAX_WAITING` of its requests wait."""
        turn = self._turns.setdefault(tenant_id, _Turn())
        if turn.users >= AT_ONCE + MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} requests of this tenant wait already; try again.")
        turn.users += 1
        try:
            async with turn.free:
                yield
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[tenant_id]


class RefusingTenantLimiter:
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


class InFlightLimiter:
    """Counts prompts between acceptance and end; refuses beyond `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0

    def enter(self, prompts: int) -> None:
        """Raises `Overloaded`."""
        if self.count + prompts > self._limit:
            raise Overloaded(f"More than {self._limit} prompts are in flight; try again.")
        self.count += prompts

    def leave(self, prompts: int) -> None:
        self.count -= prompts
