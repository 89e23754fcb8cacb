"""Bounds the memory of the JSON bodies that a gateway has received, until the engine has started their requests.

Invariant: a tenant's bodies grow to at most a third of the memory that is free after them (dynamic thresholds, Choudhury and
Hahne 1998). Alone a tenant gets a quarter of the total, and each grant leaves three quarters of the free memory to others.
"""

import asyncio
from collections import Counter
from typing import Final, Self
from uuid import UUID

from starlette.requests import Request

from loraplex.platform.errors import Overloaded, ShareExceeded
from loraplex.platform.tenant_limiter import TenantLimiter

FREE_PER_SHARE: Final = 3
"""How many times a tenant's bytes must stay free."""
CHUNKS_PER_ITERATION: Final = 4
"""Chunks of one tenant's large bodies that one iteration of the event loop reads: each takes up to half a millisecond."""
MAX_WAITING: Final = 1 << 20
OPERATORS: Final = UUID(int=0)
"""The account of bodies that operators send."""


class BodyBudget:
    """`total` bytes for the bodies of all tenants, and the turns in which they are read."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._in_use = 0
        self._tenants: Counter[UUID] = Counter()
        self._turns = TenantLimiter("chunks", per_tenant=CHUNKS_PER_ITERATION, waiting=MAX_WAITING)

    def lease(self, tenant_id: UUID) -> "BodyLease":
        """Return the lease of one body."""
        return BodyLease(self, tenant_id)

    def take(self, tenant_id: UUID, size: int) -> None:
        """Take `size` bytes; `give_back` returns them. Raises `ShareExceeded`, `Overloaded`."""
        self.require(tenant_id, size)
        self._tenants[tenant_id] += size
        self._in_use += size

    def require(self, tenant_id: UUID, size: int) -> None:
        """Check that `size` bytes could be taken now. Raises `ShareExceeded`, `Overloaded`."""
        used = self._tenants[tenant_id] + size
        if FREE_PER_SHARE * used > self._total - self._in_use - size:
            raise self._refusal(used, tenant_id)

    def give_back(self, tenant_id: UUID, size: int) -> None:
        """Return bytes that were taken."""
        self._in_use -= size
        self._tenants[tenant_id] -= size
        if not self._tenants[tenant_id]:
            del self._tenants[tenant_id]

    async def next_turn(self, tenant_id: UUID) -> None:
        """Wait until the event loop has served other work since the last `CHUNKS_PER_ITERATION` turns of this tenant."""
        async with self._turns.slot(tenant_id):
            await asyncio.sleep(0)

    def _refusal(self, used: int, tenant_id: UUID) -> ShareExceeded | Overloaded:
        """Blame the tenant if it would exceed what it had if all tenants with bodies took all they can."""
        tenants = len(self._tenants.keys() | {tenant_id})
        if used * (tenants + FREE_PER_SHARE) > self._total:
            return ShareExceeded(
                "The bodies of this tenant's requests in progress take all of its share of the server's memory; try again.",
                limit="request_bodies",
            )
        return Overloaded("The server has as many request bodies in progress as it can; try again.")


class BodyLease:
    """The bytes that one body has of the budget. What it still has at the end of its block is released."""

    def __init__(self, budget: BodyBudget, tenant_id: UUID) -> None:
        self._budget = budget
        self._tenant_id = tenant_id
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def grow(self, size: int) -> None:
        """Take `size` more bytes. Raises `ShareExceeded` (429) or `Overloaded` (503)."""
        self._budget.take(self._tenant_id, size)
        self._size += size

    def require(self, size: int) -> None:
        """Check that the body could take `size` more bytes now. Raises as `grow`."""
        self._budget.require(self._tenant_id, size)

    async def next_turn(self) -> None:
        """Wait for a turn to read more of a large body, in order of the tenant's bodies."""
        await self._budget.next_turn(self._tenant_id)

    def release(self) -> None:
        """Return all bytes. May be repeated."""
        size, self._size = self._size, 0
        if size:
            self._budget.give_back(self._tenant_id, size)


def body_lease(request: Request) -> BodyLease:
    """Lease memory for the body of `request`, on the account of the tenant that was authenticated for it."""
    budget: BodyBudget = request.app.state.body_budget
    return budget.lease(request.state.tenant_id or OPERATORS)
