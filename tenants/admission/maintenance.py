"""Background tasks of one gateway: heartbeat, leases, fences, progress, shipping, Valkey probe, reaping, reconciliation,
failed requests.

Invariant: no failure ends a task; it is logged, and the task runs again after its interval.
"""

import asyncio
from dataclasses import dataclass
from uuid import UUID

import structlog

from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.fences import Fences
from loraplex.tenants.admission.in_flight import InFlightReservations
from loraplex.tenants.admission.local_limiter import LocalLimiter
from loraplex.tenants.admission.reaper import Reaper
from loraplex.tenants.admission.reconciliation import Reconciliation
from loraplex.tenants.admission.settlement import SettlementQueue
from loraplex.tenants.circuit_breaker import CircuitBreaker
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.errors import CountersNewer, ValkeyUnavailable
from loraplex.tenants.ledger.failed_requests import FailedRequests
from loraplex.tenants.ledger.journal.journal import Journal
from loraplex.tenants.ledger.shipping import Shipping
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.repetition import repeat

LEASES_AT_ONCE = 256
LOG = structlog.get_logger("loraplex.admission_maintenance")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionMaintenance:
    """The background tasks of one gateway."""

    ledger: UsageLedger
    counters: Counters
    breaker: CircuitBreaker
    local_limiter: LocalLimiter
    requests: InFlightReservations
    settlements: SettlementQueue
    journal: Journal
    shipping: Shipping
    fences: Fences
    reaper: Reaper
    reconciliation: Reconciliation
    failed_requests: FailedRequests
    gateway_id: UUID
    settings: AdmissionConfig

    async def run(self) -> None:
        """Run all tasks until cancelled."""
        settings = self.settings
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(repeat(LOG, self.heartbeat, settings.heartbeat_s))
            tasks.create_task(repeat(LOG, self.fences.poll, settings.fence_poll_s))
            tasks.create_task(repeat(LOG, self.record_progress, settings.progress_s))
            tasks.create_task(repeat(LOG, self.retry, settings.retry_s))
            tasks.create_task(repeat(LOG, self.probe, settings.probe_s))
            tasks.create_task(repeat(LOG, self.reaper.reap, settings.heartbeat_s))
            tasks.create_task(repeat(LOG, self.reconciliation.reconcile, settings.reconcile_s))
            tasks.create_task(repeat(LOG, self.failed_requests.flush, settings.refusal_counts_s))

    async def retry(self) -> None:
        """Ship what waits for PostgreSQL, and repeat what failed."""
        self.shipping.retry()
        await self.settlements.retry()

    async def record_progress(self) -> None:
        """Write to the journal what each running request has used so far, where that has changed."""
        for request_id, running in self.requests.running.items():
            if running.used_so_far is None:
                continue
            used = running.used_so_far().priced(running.reservation.price.price)
            if used != running.journaled:
                running.journaled = used
                self.journal.progress(request_id, used)

    async def heartbeat(self) -> None:
        """Renew this gateway and all its leases in both stores, each independently of the other."""
        results = await asyncio.gather(
            self._renew_in_ledger(), self._renew_in_counters(), return_exceptions=True
        )
        failures = [each for each in results if each is not None]
        if failures:
            self.reaper.failed_to_renew()
            raise failures[0]
        self.reaper.renewed()

    async def _renew_in_ledger(self) -> None:
        live = await self.ledger.record_gateway(self.gateway_id, self.settings.gateway_live_s)
        self.local_limiter.count_gateways(live)
        ids = [reservation.id for reservation in self.requests.leased()]
        await self.ledger.renew(ids, self.settings.lease_s)

    async def _renew_in_counters(self) -> None:
        if self.breaker.is_open:
            raise ValkeyUnavailable("Valkey is not used until a probe has succeeded")
        await self._renew_leases()

    async def probe(self) -> None:
        """Close the breaker once all leases of this gateway are renewed in Valkey."""
        if not self.breaker.is_open:
            return
        try:
            await self.counters.heartbeat(self.gateway_id, [])
            await self._renew_leases()
        except ValkeyUnavailable:
            return
        self.breaker.close()
        LOG.warning("the counters are available again")

    async def _renew_leases(self) -> None:
        """Renew the leases of every tenant, even if others fail."""
        heartbeats = (
            self.counters.heartbeat(tenant_id, reservations[first : first + LEASES_AT_ONCE])
            for tenant_id, reservations in self.requests.leased_by_tenant().items()
            for first in range(0, len(reservations), LEASES_AT_ONCE)
        )
        try:
            async with asyncio.timeout(self.settings.lease_s / 3):
                replies = await asyncio.gather(*heartbeats, return_exceptions=True)
        except TimeoutError as error:
            raise ValkeyUnavailable("the leases could not be renewed in time") from error
        for reply in replies:
            # Leases in newer counters end by themselves: what their requests use is in the ledger.
            if isinstance(reply, BaseException) and not isinstance(reply, CountersNewer):
                raise reply
