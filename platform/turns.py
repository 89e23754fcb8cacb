"""How many transactions of one tenant run at once: a tenant whose requests are slow, or many, holds up its own, and never takes
all of the gateway's connections to the database.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from loraplex.platform.errors import Overloaded

AT_ONCE: Final = 4
MOST_WAITING: Final = 64


@dataclass(slots=True)
class _Turn:
    """One tenant's; `users` have it or wait for it."""

    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    users: int = 0


class Turns:
    """Of all tenants that have a request here."""

    def __init__(self) -> None:
        self._turns: dict[UUID, _Turn] = {}

    @asynccontextmanager
    async def taken(self, tenant_id: UUID) -> AsyncIterator[None]:
        """Waits for one of the tenant's `AT_ONCE` turns. Raises `Overloaded` when `MOST_WAITING` of its requests wait."""
        turn = self._turns.setdefault(tenant_id, _Turn())
        if turn.users >= AT_ONCE + MOST_WAITING:
            raise Overloaded(f"{MOST_WAITING} requests of this tenant wait already; try again.")
        turn.users += 1
        try:
            async with turn.free:
                yield
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[tenant_id]
