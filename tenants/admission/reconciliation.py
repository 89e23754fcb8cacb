"""Compares the settled use in the counters with the ledger, and rebuilds counters that lost writes or have too many.

Invariant: a drift counts only after the journals are shipped, and if it is the same twice, some seconds apart. Updates in
progress cause none: they belong to requests that the counters have open, or admitted later (README.md, "Lost writes").
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID

import structlog

from loraplex.tenants.admission.counter_drift import CounterDrift, DriftLog, compare_counters
from loraplex.tenants.admission.counter_rebuild import CounterRebuild
from loraplex.tenants.admission.fences import Fences
from loraplex.tenants.admission.in_flight import InFlightReservations
from loraplex.tenants.circuit_breaker import CircuitBreaker
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.errors import CountersNewer, StoreUnavailable
from loraplex.tenants.ledger.usage_ledger import UsageLedger

LOG = structlog.get_logger("loraplex.reconciliation")


@dataclass(eq=False)
class Reconciliation:
    """The reconciliation of one gateway, for tenants whose counters it used since it compared them last."""

    ledger: UsageLedger
    counters: Counters
    counter_rebuild: CounterRebuild
    fences: Fences
    breaker: CircuitBreaker
    requests: InFlightReservations
    max_at_once: int
    clock: Callable[[], float] = time.monotonic
    rebuilt: int = 0
    """How often counters were rebuilt because they differed from the ledger."""
    log: DriftLog = field(default_factory=DriftLog)
    _drifting: dict[UUID, CounterDrift] = field(default_factory=dict)

    async def reconcile(self) -> None:
        """Run one round. A tenant that fails does not stop the others.

        Raises `StoreUnavailable` at its end; tenants that were not reached are compared later.
        """
        if self.breaker.is_open:
            return
        active, failure = self.requests.active, None
        for tenant_id in [*active][: self.max_at_once]:
            del active[tenant_id]
            known = False
            try:
                known = await self._reconcile(tenant_id)
            except CountersNewer:
                known = True
            except StoreUnavailable as error:
                failure = error
            finally:
                if not known:
                    active[tenant_id] = None
        if failure is not None:
            raise failure

    async def _reconcile(self, tenant_id: UUID) -> bool:
        """Whether the tenant is done; False if its counters differ and must be compared once more."""
        drift = await self._drift(tenant_id)
        self.log.compared(tenant_id, drift)
        before = self._drifting.pop(tenant_id, None)
        if drift is None:
            return True
        if drift == before and not self._has_pending_updates(tenant_id):
            await self._rebuild(tenant_id, drift)
            return True
        self._drifting[tenant_id] = drift
        return False

    async def _drift(self, tenant_id: UUID) -> CounterDrift | None:
        """The drift of a tenant's counters. None also while a rebuild is in progress or the ledger has no answer."""
        counted = await self.counters.settled(tenant_id)
        if counted is None or await compare_counters(self.ledger, tenant_id, counted) is None:
            return None
        # Their gateways may not have shipped all that the counters know.
        began = self.clock()
        everywhere = await self.fences.ship_everywhere(tenant_id)
        drift = await compare_counters(self.ledger, tenant_id, counted, self.clock() - began)
        return None if drift is not None and drift.is_ahead and not everywhere else drift

    @property
    def drifts_pico(self) -> tuple[int, ...]:
        """The sizes of the drifts that are to be compared once more or repaired, in pico-units."""
        return tuple(drift.pico for drift in self._drifting.values())

    def _has_pending_updates(self, tenant_id: UUID) -> bool:
        return any(each.tenant_id == tenant_id for each in self.requests.pending_counter_updates.values())

    async def _rebuild(self, tenant_id: UUID, drift: CounterDrift) -> None:
        """Invalidate the counters, since their buckets may have lost as much, then rebuild them, unless another gateway did."""
        if not await self.counters.invalidate(tenant_id, drift.epoch):
            return
        self.rebuilt += 1
        behind = {each.period: (each.tokens, each.amount_nano) for each in drift.behind}
        LOG.warning(
            "the counters differ from the ledger; they are rebuilt", tenant=str(tenant_id), behind=behind
        )
        await self.counter_rebuild.rebuild(tenant_id)
        self.log.corrected(tenant_id)
