"""What a gateway does beside its requests: it says that it lives, renews leases, repeats what failed, probes, reaps, and
compares the counters with the books.

Invariant: no failure ends a task; each is tried again in its time, and told to the log.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from uuid import UUID

import structlog

from loraplex.tenants.admission.circuit_breaker import CircuitBreaker
from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.in_flight import InFlightReservations
from loraplex.tenants.admission.local_limiter import LocalLimiter
from loraplex.tenants.admission.reaper import Reaper
from loraplex.tenants.admission.reconciliation import Reconciliation
from loraplex.tenants.admission.settlement import SettlementQueue
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.errors import StoreUnavailable, ValkeyUnavailable
from loraplex.tenants.ledger.usage_ledger import UsageLedger

HOLDS_AT_ONCE = 256
LOG = structlog.get_logger("loraplex.admission_upkeep")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionMaintenance:
    """Of one gateway."""

    books: UsageLedger
    counters: Counters
    breaker: CircuitBreaker
    share: LocalLimiter
    requests: InFlightReservations
    settlements: SettlementQueue
    reaper: Reaper
    comparison: Reconciliation
    gateway_id: UUID
    settings: AdmissionConfig

    async def run(self) -> None:
        """Until it is cancelled."""
        settings = self.settings
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_repeat(self.beat, settings.heartbeat_s))
            tasks.create_task(_repeat(self.settlements.retry, settings.retry_s))
            tasks.create_task(_repeat(self.probe, settings.probe_s))
            tasks.create_task(_repeat(self.reaper.reap, settings.heartbeat_s))
            tasks.create_task(_repeat(self.comparison.compare, settings.compare_s))

    async def beat(self) -> None:
        """Renews this gateway and all its requests in both stores, in each whatever the other does."""
        told = await asyncio.gather(self._renew_in_books(), self._renew_asked(), return_exceptions=True)
        failures = [each for each in told if each is not None]
        if failures:
            self.reaper.failed_to_renew()
            raise failures[0]
        self.reaper.renewed()

    async def _renew_in_books(self) -> None:
        self.share.live_gateways = await self.books.seen(self.gateway_id, self.settings.gateway_live_s)
        ids = [admission.id for admission in self.requests.vouched_for()]
        await self.books.renew(ids, self.settings.lease_s)

    async def _renew_asked(self) -> None:
        if self.breaker.is_open:
            raise ValkeyUnavailable("Valkey is not asked until a probe has succeeded")
        await self._renew_leases()

    async def probe(self) -> None:
        """Closes the breaker once Valkey knows again of all that runs here."""
        if not self.breaker.is_open:
            return
        try:
            await self.counters.heartbeat(self.gateway_id, [])
            await self._renew_leases()
        except ValkeyUnavailable:
            return
        self.breaker.close()
        LOG.warning("the counters answer again")

    async def _renew_leases(self) -> None:
        """Of every tenant, though others fail: in a cluster some may lie on a node that is away."""
        heartbeats = (
            self.counters.heartbeat(tenant_id, holds[first : first + HOLDS_AT_ONCE])
            for tenant_id, holds in self.requests.holds().items()
            for first in range(0, len(holds), HOLDS_AT_ONCE)
        )
        try:
            async with asyncio.timeout(self.settings.lease_s / 3):
                answers = await asyncio.gather(*heartbeats, return_exceptions=True)
        except TimeoutError as error:
            raise ValkeyUnavailable("the leases could not be renewed in time") from error
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer


async def _repeat(step: Callable[[], Awaitable[object]], seconds: float) -> None:
    while True:
        try:
            await step()
        except StoreUnavailable as error:
            LOG.warning("will be tried again", step=step.__name__, reason=str(error))
        except Exception:
            LOG.exception("will be tried again", step=step.__name__)
        await asyncio.sleep(seconds)
