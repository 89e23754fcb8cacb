"""Watches canaries: counts what their requests became of, and sets an alias back to its baseline where a bound is broken.

Invariant: any number of gateways may watch at once; each request is counted once, and one of them sets an alias back. A guard that
fails does not stop the others.
"""

from dataclasses import dataclass
from typing import Final

import structlog

from loraplex.tenants.actors import system_actor
from loraplex.tenants.administration import canaries
from loraplex.tenants.canaries.guards import GuardedAlias, GuardRepository
from loraplex.tenants.database import Database
from loraplex.tenants.repetition import attempt, repeat
from loraplex.tenants.unit_of_work import PolicyPublisher, unit_of_work

LOOK_S: Final = 5.0
LOG = structlog.get_logger("loraplex.canaries")


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryWatch:
    """The watch of one gateway."""

    database: Database
    publisher: PolicyPublisher

    async def run(self) -> None:
        """Repeat `look` until cancelled."""
        await repeat(LOG, self.look, LOOK_S)

    async def look(self) -> None:
        """Count for every guard in force, and set back what has to go back. Raises `DatabaseUnavailable`."""
        async with self.database.as_operator() as session:
            due = await GuardRepository(session).due()
        for place in due:
            facts = {"adapter_id": str(place.adapter_id), "alias": place.alias}
            await attempt(LOG, self._watch(place), "a canary was not watched", **facts)

    async def _watch(self, place: GuardedAlias) -> None:
        async with self.database.as_operator() as session:
            guard = await GuardRepository(session).count(place)
        if guard is None or guard.broken is None:
            return
        async with unit_of_work(self.database, system_actor("canary watch"), None, self.publisher) as uow:
            reverted = await canaries.revert(uow, place)
        if reverted is not None:
            LOG.warning(
                "an alias went back", adapter=reverted.name, alias=reverted.alias, reason=guard.broken
            )
