"""Admission control of one gateway: reserves from every limit or from none, and settles each request once.

Invariant: a reservation is in the journal before any byte of the response is sent, and its end before the last byte. PostgreSQL
is waited for only where no counters count.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from uuid import UUID

import structlog
from redis.asyncio import Redis

from loraplex.tenants.admission.allowance import CompletionAllowance
from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.counter_rebuild import CounterRebuild
from loraplex.tenants.admission.denial_log import DenialLog
from loraplex.tenants.admission.fences import Fences
from loraplex.tenants.admission.in_flight import InFlightReservations, PendingSettlement, RunningRequest
from loraplex.tenants.admission.local_limiter import LocalLimiter
from loraplex.tenants.admission.maintenance import AdmissionMaintenance
from loraplex.tenants.admission.reaper import Reaper
from loraplex.tenants.admission.recent_refusals import RecentRefusals
from loraplex.tenants.admission.reconciliation import Reconciliation
from loraplex.tenants.admission.recording import AdmissionRecorder, MeasuredAdmission
from loraplex.tenants.admission.reserve import STALLED, Reserver
from loraplex.tenants.admission.settlement import SettlementQueue
from loraplex.tenants.api_keys.keys import AuthenticatedKey
from loraplex.tenants.billing.price_book import PriceBook
from loraplex.tenants.circuit_breaker import CircuitBreaker
from loraplex.tenants.counters.counter_replies import Explanation, LimitUse
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.database import Database
from loraplex.tenants.errors import (
    CountersNewer,
    LimitExceeded,
    PolicyStale,
    StoreUnavailable,
    ValkeyUnavailable,
)
from loraplex.tenants.ledger.failed_requests import FailedRequests, Failure
from loraplex.tenants.ledger.journal.journal import Journal
from loraplex.tenants.ledger.shipping import Shipping
from loraplex.tenants.ledger.usage_ledger import Ended, UsageLedger
from loraplex.tenants.quotas.limits import Subject
from loraplex.tenants.quotas.policies import Policies
from loraplex.tenants.quotas.reservation import (
    NOTHING_USED,
    REFUSED,
    OnProvisional,
    Reservation,
    ReservationRequest,
    SettledUsage,
)

FINISH_SECONDS = 5.0
LOG = structlog.get_logger("loraplex.admissions")
DEFAULTS = AdmissionConfig()


class QuotaAdmissionController:
    """Admits and settles the requests of one gateway. Run its `maintenance`; `close` it before its stores."""

    def __init__(
        self,
        database: Database,
        redis: Redis,
        prices: PriceBook,
        gateway_id: UUID,
        settings: AdmissionConfig = DEFAULTS,
        *,
        journal: Journal,
        bulk_redis: Redis | None = None,
        clock: Callable[[], float] = time.monotonic,
        recorder: AdmissionRecorder | None = None,
    ) -> None:
        """`redis` serves admissions, which wait `settings.valkey_s`, so its own timeouts are longer. `bulk_redis` serves what
        may take long, such as counter rebuilds. `journal` is closed after this.
        """
        self._gateway_id, self._journal = gateway_id, journal
        self._recorder = recorder or AdmissionRecorder()
        self._requests = requests = InFlightReservations()
        self._ledger = ledger = UsageLedger(database)
        self._failed_requests = FailedRequests(ledger.keep_failed, ledger.count_refusals)
        self.counters = counters = Counters(
            redis, bulk_redis, lease_s=settings.lease_s, command_s=settings.valkey_s
        )
        self.on_policy_outdated: Callable[[UUID], None] = _ignore
        """Gets each tenant of which a request was admitted under an outdated policy: cached keys are outdated, too."""
        self._outdated: dict[UUID, asyncio.Task[None]] = {}
        self._shipping = shipping = Shipping(
            journal,
            ledger,
            gateway_id,
            settings.lease_s,
            on_shipped=lambda ends: self._settlements.shipped(ends),
            on_policy_outdated=self._policy_outdated,
        )
        self.on_ended: Callable[[Ended], None] = _ignore
        """Gets whose running requests end; they have begun before."""
        fences = Fences(
            ledger, shipping.ship, gateway_id, settings, end=lambda ended: self.on_ended(ended), clock=clock
        )
        self._counter_rebuild = rebuild = CounterRebuild(
            ledger, counters, fences, bulk_redis or redis, gateway_id
        )
        breaker, limiter = CircuitBreaker(), LocalLimiter(clock)
        self._settlements = settlements = SettlementQueue(
            journal, counters, rebuild, breaker, requests, settings.max_pending_updates, clock
        )
        reaper = Reaper(ledger, counters, requests, fences, settings.lease_s, clock)
        self.reconciliation = Reconciliation(
            ledger, counters, rebuild, fences, breaker, requests, settings.reconciled_at_once
        )
        self._reserver = Reserver(
            ledger=ledger,
            counters=counters,
            breaker=breaker,
            journal=journal,
            fences=fences,
            local_limiter=limiter,
            gateway_id=gateway_id,
            settings=settings,
            counter_rebuild=rebuild,
            policies=Policies(ledger.policy, bounded=database.bounded),
            denials=DenialLog(clock),
            recent_refusals=RecentRefusals(clock),
            prices=prices,
            report_overdue=reaper.overdue.add,
            cancel_later=settlements.cancel_later,
            withdraw=self._withdraw,
            withdraw_later=settlements.withdraw_later,
        )
        self.maintenance = AdmissionMaintenance(
            ledger=ledger,
            counters=counters,
            breaker=breaker,
            journal=journal,
            fences=fences,
            local_limiter=limiter,
            gateway_id=gateway_id,
            settings=settings,
            requests=requests,
            settlements=settlements,
            shipping=shipping,
            reaper=reaper,
            reconciliation=self.reconciliation,
            failed_requests=self._failed_requests,
        )

    @property
    def degraded(self) -> bool:
        """Whether the gateway admits without the counters, because Valkey failed."""
        return self.maintenance.breaker.is_open

    def journal_trouble(self) -> str | None:
        """Why the journal would refuse an admission now; None where it would not."""
        return STALLED if self._reserver.journal_stalls else self._journal.trouble

    async def admit(
        self, request: ReservationRequest, on_provisional: OnProvisional | None = None
    ) -> Reservation:
        """Reserve what the request may use. The caller must `settle` or `cancel` the reservation.

        `on_provisional` is called when the counters have admitted the request: work may start. No part of the response
        may be sent before this returns: only then is the reservation in the journal, and it may still be refused.

        Raises `PolicyStale`, `RateLimited`, `QuotaExhausted`, `PriceMissing`, `JournalFull` and other subclasses of `StoreUnavailable`.
        """
        with MeasuredAdmission(self._recorder, on_provisional) as measured:
            self._requests.active[request.tenant_id] = None
            reservation = await self._reserver.reserve(request, measured.on_provisional)
            measured.degraded = reservation.degraded
        self._requests.running[reservation.id] = RunningRequest(reservation)
        self._shipping.begin()
        return reservation

    async def allowance(self, request: ReservationRequest, *, unused: bool = False) -> CompletionAllowance:
        """What the limits can admit of completions beside the prompts of a request whose other sizes are not known yet.

        `unused`: what is left of days and months is asked of the counters; else nothing counts as used. Raises `PolicyStale`,
        `PriceMissing` and subclasses of `StoreUnavailable`.
        """
        return await self._reserver.allowance(request, unused=unused)

    def follow(self, reservation: Reservation, used_so_far: Callable[[], SettledUsage]) -> None:
        """Write what the request has used so far to the journal while it runs. `used_so_far` is called twice a second."""
        running = self._requests.running.get(reservation.id)
        if running is not None:
            running.used_so_far = used_so_far

    def recent_refusal(self, key: AuthenticatedKey, request_id: str) -> LimitExceeded | None:
        """Refuse a request of this caller as an earlier one, if the counters would certainly refuse it now; else return None."""
        began = time.perf_counter()
        if key.tenant_id is None or key.policy_epoch is None:
            return None
        found = self._reserver.recent_refusals.find(key.tenant_id, key.api_key_id, key.policy_epoch)
        if found is None:
            return None
        self._reserver.denials.remember(
            key.tenant_id, Explanation(request_id=request_id, at=found.at, decisions=(found.decision,))
        )
        error = found.error(self._reserver.recent_refusals.now())
        self._recorder.refused(error, time.perf_counter() - began)
        return error

    def note_failure(self, failure: Failure) -> None:
        """Keep a request that failed or was refused, for its tenant's list of requests and overview."""
        self._failed_requests.add(failure)

    async def settle(self, reservation: Reservation, usage: SettledUsage) -> None:
        """Settle a request. Returns when the usage is in the journal. May be repeated. Raises `JournalUnavailable`; then the
        usage is kept in memory and written later.
        """
        began = time.perf_counter()
        cost = usage.cost_pico(reservation.price.price)
        usage = replace(usage, amount_pico=cost, limits=reservation.limits)
        if self._ended(reservation, usage):
            await self._withdraw(reservation, usage)
        self._recorder.settled(reservation.request.tokens, usage.tokens, time.perf_counter() - began)

    async def cancel(self, reservation: Reservation, *, refused: bool = False) -> None:
        """Cancel a reservation: nothing was used. May be repeated, and has no effect after `settle`.

        `refused`: by this server, not given up by its client; then the request is given back as well.
        """
        usage = REFUSED if refused else NOTHING_USED
        if self._ended(reservation, usage):
            await self._withdraw(reservation, usage)

    async def quotas(self, tenant_id: UUID, subjects: Sequence[Subject]) -> list[LimitUse]:
        """The use of every limit of these subjects of the tenant.

        Raises `ValkeyUnavailable`, `CountersNewer`, `DatabaseUnavailable`.
        """
        uses = await self.counters.read(tenant_id, subjects)
        if uses is None:
            await self._counter_rebuild.rebuild(tenant_id)
            uses = await self.counters.read(tenant_id, subjects)
        if uses is None:
            raise ValkeyUnavailable("the counters were lost while they were read; try again")
        return uses

    async def explain(self, tenant_id: UUID, request_id: str) -> Explanation | None:
        """Why a request was denied recently, by the counters or by this gateway without them; None if it was not.

        Raises `ValkeyUnavailable` or `CountersNewer` if only the counters could know.
        """
        here = self._reserver.denials.find(tenant_id, request_id)
        if here is not None and self.degraded:
            return here
        try:
            return await self.counters.explain(tenant_id, request_id) or here
        except (ValkeyUnavailable, CountersNewer):
            if here is None:
                raise
            return here

    async def publish(self, tenant_id: UUID) -> None:
        """Publish that the tenant's keys or limits have changed. Without it, the ledger still refuses outdated callers."""
        try:
            policy = await self._reserver.policies.refresh(tenant_id)
            await self.counters.publish_policy(tenant_id, policy.policy_epoch)
        except StoreUnavailable as error:
            LOG.warning("a policy could not be published", tenant=str(tenant_id), reason=str(error))

    async def require_policy(self, tenant_id: UUID, policy_epoch: int) -> None:
        """Raise `PolicyStale` if a newer policy of the tenant was published, `StoreUnavailable` if that is unknown."""
        if self.degraded:
            raise ValkeyUnavailable("Valkey is not used until a probe has succeeded")
        newest = await self.counters.publish_policy(tenant_id, policy_epoch)
        if newest > policy_epoch:
            raise PolicyStale(f"the caller's policy is older than epoch {newest}")

    async def recount(self, tenant_id: UUID) -> None:
        """Rebuild the tenant's counters from the ledger, after a correction. Where that fails, reconciliation finds the
        difference later.
        """
        try:
            await self._counter_rebuild.rebuild(tenant_id)
        except StoreUnavailable as error:
            LOG.warning("the counters wait for a correction", tenant=str(tenant_id), reason=str(error))

    def rebuild_later(self, tenant_ids: set[UUID]) -> None:
        """Rebuild the counters of these tenants in the background: the ledger got usage that they may not know."""
        self._requests.to_rebuild |= tenant_ids

    async def close(self) -> None:
        """Ship the journal, for a few seconds at most, then remove this gateway. The next start ships what is left."""
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                await self._settlements.write_ends()
                await self._shipping.ship()
            await self._finish_counters()
            await self._failed_requests.flush()
            await self._ledger.remove_gateway(self._gateway_id)
        except (StoreUnavailable, TimeoutError) as error:
            LOG.warning("the journal is shipped at the next start", reason=str(error))
        finally:
            await self._shipping.close()
            await self._ledger.close()

    async def _finish_counters(self) -> None:
        """Send the counters what they miss. Without it, other gateways end the leases and reconcile."""
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                await self._settlements.sent()
                await self._settlements.retry()
        except (StoreUnavailable, TimeoutError) as error:
            LOG.warning("other gateways bring the counters up to date", reason=str(error))

    def _ended(self, reservation: Reservation, usage: SettledUsage) -> bool:
        """Return whether the request was running until now."""
        if self._requests.running.pop(reservation.id, None) is None:
            return False
        self.maintenance.local_limiter.settle(reservation.id, usage.tokens, refused=usage.refused)
        if usage.refused:
            self._reserver.recent_refusals.forget(reservation.request)
        return True

    async def _withdraw(self, reservation: Reservation, usage: SettledUsage = NOTHING_USED) -> None:
        self._requests.active[reservation.tenant_id] = None
        await self._settlements.settle(PendingSettlement(reservation, usage))
        self._shipping.begin()

    def _policy_outdated(self, tenant_id: UUID) -> None:
        """Publish the policy in the background, since its publication was missed."""
        self.on_policy_outdated(tenant_id)
        if tenant_id not in self._outdated:
            publishing = self._outdated[tenant_id] = asyncio.create_task(self.publish(tenant_id))
            publishing.add_done_callback(lambda _: self._outdated.pop(tenant_id, None))


def _ignore(_: object) -> None:
    return None
