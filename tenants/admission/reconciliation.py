"""Compares what the counters have settled with the books, and seeds those anew that lost writes or have too many.

Invariant: a difference counts only when it is the same twice, some seconds apart, and what is on its way makes none: use
that the counters were not told yet is that of requests they hold open, or let in later (README.md, "Lost writes").
"""

from dataclasses import dataclass
from uuid import UUID

import structlog

from loraplex.tenants.admission.circuit_breaker import CircuitBreaker
from loraplex.tenants.admission.counter_rebuild import CounterRebuild
from loraplex.tenants.admission.in_flight import InFlightReservations
from loraplex.tenants.counters.counter_replies import PeriodUse
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.errors import StoreUnavailable
from loraplex.tenants.ledger.usage_ledger import UsageLedger

LOG = structlog.get_logger("loraplex.comparison")


@dataclass(frozen=True, slots=True)
class CounterDrift:
    """By how much the counters of an epoch are behind the books; negative where they are ahead."""

    epoch: int
    behind: tuple[PeriodUse, ...]


class Reconciliation:
    """Of one gateway, for the tenants that it asked or told something since it compared them last."""

    def __init__(
        self,
        books: UsageLedger,
        counters: Counters,
        seeding: CounterRebuild,
        breaker: CircuitBreaker,
        requests: InFlightReservations,
        most_at_once: int,
    ) -> None:
        self.mended = 0
        """How often counters were seeded anew because they were not what the books say."""
        self._books = books
        self._counters = counters
        self._seeding = seeding
        self._breaker = breaker
        self._requests = requests
        self._most_at_once = most_at_once
        self._differing: dict[UUID, CounterDrift] = {}

    async def compare(self) -> None:
        """One round, of every tenant, though others fail: a node of a cluster may be away. Raises `StoreUnavailable` at its
        end; tenants that were not reached are compared later.
        """
        if self._breaker.is_open:
            return
        active, failure = self._requests.active, None
        for tenant_id in [*active][: self._most_at_once]:
            del active[tenant_id]
            known = False
            try:
                known = await self._compare(tenant_id)
            except StoreUnavailable as error:
                failure = error
            finally:
                if not known:
                    active[tenant_id] = None
        if failure is not None:
            raise failure

    async def _compare(self, tenant_id: UUID) -> bool:
        """False: it differs, and is to be compared once more."""
        found = await self._difference(tenant_id)
        before = self._differing.pop(tenant_id, None)
        if found is None:
            return True
        if found == before and not self._is_telling(tenant_id):
            await self._mend(tenant_id, found)
            return True
        self._differing[tenant_id] = found
        return False

    async def _difference(self, tenant_id: UUID) -> CounterDrift | None:
        """None, too, while a seeding is under way, or nobody can tell."""
        counted = await self._counters.settled(tenant_id)
        if counted is None:
            return None
        booked = await self._books.settled(tenant_id, counted)
        if booked is None or booked.epoch != counted.epoch or booked.uses == counted.uses:
            return None
        behind = tuple(
            PeriodUse(right.period, right.tokens - there.tokens, right.amount_nano - there.amount_nano)
            for right, there in zip(booked.uses, counted.uses, strict=True)
        )
        return CounterDrift(counted.epoch, behind)

    def _is_telling(self, tenant_id: UUID) -> bool:
        return any(each.tenant_id == tenant_id for each in self._requests.uncounted.values())

    async def _mend(self, tenant_id: UUID, found: CounterDrift) -> None:
        """Forgotten first: their buckets may have lost as much. Nothing is done where another gateway was quicker."""
        if not await self._counters.invalidate(tenant_id, found.epoch):
            return
        self.mended += 1
        behind = {each.period: (each.tokens, each.amount_nano) for each in found.behind}
        LOG.warning("the counters were not what the books say", tenant=str(tenant_id), behind=behind)
        await self._seeding.seed(tenant_id)
