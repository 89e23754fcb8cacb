"""Admission of requests: from every limit at once or not at all, written down, and settled once, whatever fails between.

Invariant: what is admitted is in the books before anything of it is told; until it is settled there its gateway vouches
for it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol
from uuid import UUID

import structlog

from loraplex.tenants.admission.circuit_breaker import CircuitBreaker
from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.counter_rebuild import CounterRebuild
from loraplex.tenants.admission.denial_log import DenialLog
from loraplex.tenants.admission.in_flight import InFlightReservations, PendingSettlement
from loraplex.tenants.admission.local_limiter import LocalLimiter
from loraplex.tenants.admission.maintenance import AdmissionMaintenance
from loraplex.tenants.admission.reaper import Reaper
from loraplex.tenants.admission.reconciliation import Reconciliation
from loraplex.tenants.admission.reserve import Reserver
from loraplex.tenants.admission.settlement import SettlementQueue
from loraplex.tenants.billing.pricing import Price, amount_nano
from loraplex.tenants.counters.counter_replies import Explanation, LimitUse
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable, StoreUnavailable, ValkeyUnavailable
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.quotas.limits import Subject
from loraplex.tenants.quotas.policies import Policies
from loraplex.tenants.quotas.reservation import (
    NOTHING_USED,
    ActualUsage,
    LedgerUsage,
    OnProvisional,
    Reservation,
    ReservationRequest,
    SettledUsage,
    not_told,
)
from loraplex.tenants.rate_state import Rate, RateState
from loraplex.tenants.valkey import Valkey

__all__ = [
    "AdmissionConfig",
    "QuotaAdmissionController",
    "Rate",
    "RateState",
    "Reservation",
    "ReservationRequest",
    "SettledUsage",
]

FORGOTTEN_GATEWAY_SECONDS = 3600.0
LOG = structlog.get_logger("loraplex.admissions")
DEFAULTS = AdmissionConfig()


class QuotaAdmissionController:
    """Of one gateway. Somebody must `run` it; `close` it before its stores."""

    def __init__(
        self,
        database: Database,
        redis: Valkey,
        price: Price,
        gateway_id: UUID,
        settings: AdmissionConfig = DEFAULTS,
        *,
        patient: Valkey | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`redis` is given up after `settings.valkey_s`, so its own timeouts are longer; `patient` serves what may take long, as
        seeding does.
        """
        self._price, self._gateway_id, self._settings = price, gateway_id, settings
        self._requests = InFlightReservations()
        self._books = books = UsageLedger(database)
        self._counters = counters = Counters(
            redis, patient, lease_s=settings.lease_s, command_s=settings.valkey_s
        )
        self._policies = Policies(books.policy)
        self._seeding = CounterRebuild(books, counters, patient or redis, gateway_id)
        self._share = LocalLimiter(clock)
        self._denials = DenialLog(clock)
        self._breaker = breaker = CircuitBreaker()
        self._settlements = SettlementQueue(
            books, counters, self._seeding, breaker, self._requests, settings.most_pending, clock
        )
        self._reaper = Reaper(books, counters, self._requests, settings.lease_s, clock)
        self._comparison = Reconciliation(
            books, counters, self._seeding, breaker, self._requests, settings.compared_at_once
        )
        self._gate = Reserver(
            books=books,
            counters=counters,
            seeding=self._seeding,
            policies=self._policies,
            breaker=breaker,
            booking=CircuitBreaker(most_failures=1),
            share=self._share,
            denials=self._denials,
            price=price,
            gateway_id=gateway_id,
            settings=settings,
            tell_overdue=self._reaper.overdue.add,
            abandon=self._settlements.abandon,
        )
        self.upkeep = AdmissionMaintenance(
            books=books,
            counters=counters,
            breaker=breaker,
            share=self._share,
            requests=self._requests,
            settlements=self._settlements,
            reaper=self._reaper,
            comparison=self._comparison,
            gateway_id=gateway_id,
            settings=settings,
        )

    @property
    def degraded(self) -> bool:
        """Whether the counters are not asked now, because they did not answer."""
        return self._breaker.is_open

    @property
    def script_fallbacks(self) -> int:
        """How often Valkey did not know a script and was sent its text."""
        return self._counters.script_fallbacks

    @property
    def counters_mended(self) -> int:
        """How often counters were seeded anew because they were not what the books say."""
        return self._comparison.mended

    async def admit(self, request: ReservationRequest, let_in: OnProvisional = not_told) -> Reservation:
        """Whoever gets it must `settle` or `release` it. From `let_in` on the request may be worked on, but nothing of its
        answer may leave before this returns: only then it is in the books, and it may still be refused.

        Raises `PolicyStale`, `RateLimited`, `QuotaExhausted`, `QuotaUnavailable`, `DatabaseUnavailable`.
        """
        if len(self._requests.unbooked) >= self._settings.most_pending:
            raise DatabaseUnavailable("too much usage waits for PostgreSQL; nothing more is admitted")
        if request.key.tenant_id is not None:
            self._requests.active[request.key.tenant_id] = None
        admission = await self._gate.admit(request, let_in)
        self._requests.running[admission.id] = admission
        return admission

    async def settle(self, admission: Reservation, usage: SettledUsage) -> None:
        """Returns when the usage is in the books, or when it waits for PostgreSQL. Harmless when repeated."""
        pico = self._price.amount_pico(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        actual = ActualUsage(usage.prompt_tokens + usage.completion_tokens, amount_nano(pico))
        await self._end(admission, usage, pico, actual)

    async def release(self, admission: Reservation) -> None:
        """As if the request had never been. Harmless when repeated, or after it was settled."""
        await self._end(admission, None, 0, NOTHING_USED)

    async def quotas(self, tenant_id: UUID, subjects: Sequence[Subject]) -> list[LimitUse]:
        """What is used of every limit of these subjects of the tenant.

        Raises `ValkeyUnavailable`, `DatabaseUnavailable`.
        """
        uses = await self._counters.read(tenant_id, subjects)
        if uses is None:
            await self._seeding.seed(tenant_id)
            uses = await self._counters.read(tenant_id, subjects)
        if uses is None:
            raise ValkeyUnavailable("the counters were lost while they were read; try again")
        return uses

    async def explain(self, tenant_id: UUID, request_id: str) -> Explanation | None:
        """Why a request was denied, if it was of late: by the counters, or by this gateway without them.

        Raises `ValkeyUnavailable` where the counters would have to tell.
        """
        here = self._denials.find(tenant_id, request_id)
        if here is not None and self.degraded:
            return here
        try:
            return await self._counters.explain(tenant_id, request_id) or here
        except ValkeyUnavailable:
            if here is None:
                raise
            return here

    async def publish(self, tenant_id: UUID) -> None:
        """Tells all gateways that the tenant's keys or limits have changed; the books would stop stale callers anyway."""
        try:
            policy = await self._policies.refresh(tenant_id)
            await self._counters.publish_policy(tenant_id, policy.policy_epoch)
        except StoreUnavailable as error:
            LOG.warning("a policy could not be published", tenant=str(tenant_id), reason=str(error))

    async def run(self) -> None:
        """Heartbeats, retries, probes, reaping and comparing, until it is cancelled."""
        await self.upkeep.run()

    async def close(self) -> None:
        """What still waits for PostgreSQL is tried for some seconds more."""
        try:
            await self._settlements.finish()
            await self._books.gone(self._gateway_id, FORGOTTEN_GATEWAY_SECONDS)
        except StoreUnavailable as error:
            LOG.warning("the gateway could not take its leave", reason=str(error))
        finally:
            await self._books.close()

    async def _end(
        self, admission: Reservation, usage: SettledUsage | None, pico: int, actual: ActualUsage
    ) -> None:
        if self._requests.running.pop(admission.id, None) is None:
            return
        self._share.leave(admission.id, actual.tokens)
        self._requests.active[admission.tenant_id] = None
        await self._settlements.settle(
            PendingSettlement(admission, usage_row(admission, usage, pico), actual)
        )


def usage_row(admission: Reservation, usage: SettledUsage | None, amount_pico: int) -> LedgerUsage:
    """`usage` None: the request never began."""
    hold = admission.hold
    return LedgerUsage(
        id=admission.id,
        tenant_id=admission.tenant_id,
        api_key_id=hold.api_key_id,
        adapter_id=hold.adapter_id,
        adapter_version=admission.adapter_version,
        digest=admission.digest,
        outcome=None if usage is None else usage.outcome,
        prompt_tokens=0 if usage is None else usage.prompt_tokens,
        cached_tokens=0 if usage is None else usage.cached_tokens,
        completion_tokens=0 if usage is None else usage.completion_tokens,
        amount_pico=amount_pico,
        day=hold.day,
        month=hold.month,
        admitted_at=admission.admitted_at,
    )


class AdmissionController(Protocol):
    """Lets requests in within their limits, reserving the most they may use, and writes down what they did use."""

    async def admit(self, request: ReservationRequest, let_in: OnProvisional = not_told) -> Reservation:
        """`let_in` is called when work on it may begin; nothing of its answer may leave before this returns.

        Raises `LimitExceeded`, `PolicyStale` or `StoreUnavailable` of tenants, also after `let_in`.
        """
        ...

    async def settle(self, admission: Reservation, usage: SettledUsage) -> None:
        """In place of the reservation; never lost, and harmless when repeated."""
        ...

    async def release(self, admission: Reservation) -> None:
        """As if the request had never been."""
        ...

    async def quotas(self, tenant_id: UUID, subjects: Sequence[Subject]) -> Sequence[LimitUse]:
        """What is used of every limit of these subjects of the tenant. Raises `StoreUnavailable`."""
        ...

    async def explain(self, tenant_id: UUID, request_id: str) -> Explanation | None:
        """Why a request was refused lately; None when it was not. Raises `StoreUnavailable`."""
        ...
