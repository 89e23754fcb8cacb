"""Reserves for one request in the counters and in the ledger, or, without the counters, by this gateway's share.

Invariant: a request is admitted only when the ledger has its reservation under the epoch of the counters that admitted it.
Until then its admission is provisional: work may start, but no part of the response may be sent.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from uuid import UUID

import structlog

from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.counter_rebuild import CounterRebuild
from loraplex.tenants.admission.denial_log import DenialLog
from loraplex.tenants.admission.local_limiter import LocalLimiter
from loraplex.tenants.admission.recent_refusals import RecentRefusals
from loraplex.tenants.admission.rejections import degraded_denial, rate_state, refusal, unknown_limits
from loraplex.tenants.billing.price_book import PriceBook
from loraplex.tenants.billing.pricing import PriceVersion
from loraplex.tenants.circuit_breaker import CircuitBreaker
from loraplex.tenants.counters.counter_replies import (
    Admitted,
    CounterReply,
    CountersMissing,
    Denied,
    PolicyOutdated,
)
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.counters.deadline import GRACE_SECONDS, deadline
from loraplex.tenants.errors import (
    DatabaseUnavailable,
    InvalidField,
    LimitExceeded,
    PolicyStale,
    QuotaUnavailable,
    ValkeyUnavailable,
)
from loraplex.tenants.ledger.usage_ledger import Reserved, ReservedUnder, UsageLedger
from loraplex.tenants.quotas.limits import COUNTED, PERIODIC, LimitName
from loraplex.tenants.quotas.periods import periods_of
from loraplex.tenants.quotas.policies import Policies
from loraplex.tenants.quotas.reservation import OnProvisional, Reservation, ReservationRequest

# Together the pauses are longer than the lock of a rebuild lives.
TRIES = 12
PAUSE_SECONDS = 0.01
# Attempts before this gateway rebuilds the counters itself: the gateway that took the next epoch needs time to replace them.
RETRIES_BEFORE_REBUILD = {Reserved.EPOCH_MOVED: 1, Reserved.EPOCH_LOCKED: 5}
# The wait of both attempts together, in units of `valkey_s`, which bounds one attempt.
TOTAL_WAIT = 1.8
LOG = structlog.get_logger("loraplex.admission")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserver:
    """Reserves for the requests of one gateway.

    `breaker` is Valkey's. `ledger_breaker` is open from a failure of the ledger until it stores a reservation again;
    meanwhile no admission is provisional. `report_overdue` gets each tenant with expired leases. `cancel_later` gets
    (tenant, id) of a refused request that Valkey may still admit.
    """

    ledger: UsageLedger
    counters: Counters
    counter_rebuild: CounterRebuild
    policies: Policies
    breaker: CircuitBreaker
    ledger_breaker: CircuitBreaker
    local_limiter: LocalLimiter
    denials: DenialLog
    recent_refusals: RecentRefusals
    prices: PriceBook
    gateway_id: UUID
    settings: AdmissionConfig
    report_overdue: Callable[[UUID], None]
    cancel_later: Callable[[UUID, UUID], None]

    async def reserve(
        self, request: ReservationRequest, on_provisional: OnProvisional | None = None
    ) -> Reservation:
        """Reserve what a request may use. `on_provisional` is called when the counters have admitted it, unless
        `ledger_breaker` is open; perhaps more than once.

        The counters are called twice in a row while the breaker is closed: a closed connection fails at once, and on a busy
        machine one reply may be late. Raises `PolicyStale`, `LimitExceeded`, `PriceMissing`, `QuotaUnavailable`, `DatabaseUnavailable`.
        """
        request = await self._bounded(request)
        if self.breaker.is_open:
            return await self._by_local_limiter(request)
        repeated_until: float | None = None
        async with self._cancelled_on_error(request):
            for attempt in range(TRIES):
                asked_at, last = self.recent_refusals.now(), repeated_until or self._total_wait()
                try:
                    async with self._deadline(last):
                        reply = await self.counters.reserve(request)
                except (TimeoutError, ValkeyUnavailable) as error:
                    self.breaker.failed()
                    if repeated_until is None and not self.breaker.is_open:
                        repeated_until = last
                        continue
                    raise ValkeyUnavailable(str(error) or "Valkey did not answer in time") from error
                repeated_until = None
                self.breaker.succeeded()
                if isinstance(reply, Admitted):
                    reservation = self._provisional(request, reply, on_provisional)
                    outcome = (await self._write(reservation)).outcome
                    if outcome is Reserved.KEPT:
                        return reservation
                    outdated = attempt >= RETRIES_BEFORE_REBUILD[outcome]
                else:
                    self._raise_refusal(request, reply, asked_at)
                    outdated = True
                if not outdated or not await self.counter_rebuild.try_rebuild(request.tenant_id):
                    await asyncio.sleep(PAUSE_SECONDS * (attempt + 1))
            raise self._unavailable(
                request, COUNTED, "the counters of this tenant are being rebuilt; try again"
            )
        return await self._without_counters(request)

    async def _bounded(self, request: ReservationRequest) -> ReservationRequest:
        """Add the limits that the request counts for, and the most it can cost."""
        policy = await self.policies.of(request.tenant_id, request.policy_epoch)
        return replace(
            request,
            subjects=policy.subjects(request.tenant_id, request.api_key_id, request.adapter_id),
            amount_nano=self.prices.bound_nano(
                request.tenant_id,
                request.tier,
                request.adapter_name,
                datetime.now(UTC),
                request.prompt_tokens,
                request.completion_tokens,
            ),
        )

    def _price(self, request: ReservationRequest, admitted_at: datetime) -> PriceVersion:
        """Return the price at the time of admission. A card that began after the bound was taken may exceed what is reserved."""
        chosen = self.prices.price(request.tenant_id, request.tier, request.adapter_name, admitted_at)
        if chosen.price.bound_nano(request.prompt_tokens, request.completion_tokens) > request.amount_nano:
            raise QuotaUnavailable("the price rose while this request was admitted; try again")
        return chosen

    @asynccontextmanager
    async def _cancelled_on_error(self, request: ReservationRequest) -> AsyncIterator[None]:
        """Cancel what the counters may have of a request when the block fails. An unavailable Valkey only ends the block.

        A denial takes nothing, so nothing is cancelled after it.
        """
        try:
            yield
        except ValkeyUnavailable as error:
            LOG.warning("Valkey did not answer; admitting without the counters", reason=str(error))
        except LimitExceeded:
            raise
        except asyncio.CancelledError:
            self.cancel_later(request.tenant_id, request.id)
            raise
        except Exception:
            await self._cancel(request)
            raise

    def _total_wait(self) -> float:
        """When both calls of an attempt must have ended, including their wait for a connection."""
        return asyncio.get_running_loop().time() + TOTAL_WAIT * self.settings.valkey_s

    def _deadline(self, last: float) -> AbstractAsyncContextManager[None]:
        now = asyncio.get_running_loop().time()
        # An event loop that was blocked beyond `last` still waits a moment: the delay was not Valkey's.
        return deadline(max(min(now + self.settings.valkey_s, last), now + GRACE_SECONDS))

    def _provisional(
        self, request: ReservationRequest, reply: Admitted, on_provisional: OnProvisional | None
    ) -> Reservation:
        price = self._price(request, reply.at)
        if on_provisional is not None and not self.ledger_breaker.is_open:
            on_provisional()
        self._note_overdue(request.tenant_id, reply.overdue)
        return Reservation(
            request=request,
            day=reply.day,
            month=reply.month,
            admitted_at=reply.at,
            price=price,
            epoch=reply.epoch,
            rate=rate_state(reply.decisions),
        )

    def _raise_refusal(self, request: ReservationRequest, reply: CounterReply, asked_at: float) -> None:
        """Raise what a refusal means. Returns only for `CountersMissing`."""
        if isinstance(reply, Denied):
            self._note_overdue(request.tenant_id, reply.overdue)
            self.recent_refusals.remember(request, reply, asked_at)
            raise refusal(reply)
        if isinstance(reply, PolicyOutdated):
            raise PolicyStale(f"the caller's policy is older than epoch {reply.policy_epoch}")
        if not isinstance(reply, CountersMissing):
            raise InvalidField("id", f"admission {request.id} has ended already")

    async def _write(self, reservation: Reservation) -> ReservedUnder:
        """Write the reservation to the ledger; gives up long before a reaper may end the lease in the counters.

        The outcome is not `KEPT` if a rebuild took the next epoch meanwhile: the counters that admitted it are outdated.
        """
        lease_s = self.settings.lease_s
        try:
            async with asyncio.timeout(lease_s / 2):
                reserved = await self.ledger.reserve(reservation, self.gateway_id, lease_s)
        except (TimeoutError, DatabaseUnavailable) as error:
            self.ledger_breaker.failed()
            if isinstance(error, DatabaseUnavailable):
                raise
            raise DatabaseUnavailable("too many reservations wait for PostgreSQL") from error
        self.ledger_breaker.close()
        if reserved.outcome is Reserved.POLICY_STALE:
            raise PolicyStale("the policy of the caller's tenant has changed meanwhile")
        return reserved

    async def _without_counters(self, request: ReservationRequest) -> Reservation:
        """Reserve by this gateway's share. The counters may still admit the request, so a refused one is cancelled there."""
        try:
            return await self._by_local_limiter(request)
        except BaseException:
            self.cancel_later(request.tenant_id, request.id)
            raise

    async def _by_local_limiter(self, request: ReservationRequest) -> Reservation:
        """Reserve by this gateway's share, then in the ledger. Refuses tenants with a limit per day or month."""
        if any(subject.limits.has_periods() for subject in request.subjects):
            message = "what is left of a day's or month's quota is unknown now; try again"
            raise self._unavailable(request, PERIODIC, message)
        now = datetime.now(UTC)
        periods, price = periods_of(now), self._price(request, now)
        asked = request.subjects, request.tokens, request.sequences
        try:
            rate = self.local_limiter.admit(request.id, *asked)
        except LimitExceeded:
            decisions = self.local_limiter.decisions(*asked)
            self.denials.remember(request.tenant_id, degraded_denial(request, now, decisions=decisions))
            raise
        reservation = Reservation(
            request=request,
            day=periods.day,
            month=periods.month,
            admitted_at=now,
            price=price,
            rate=rate,
            degraded=True,
        )
        try:
            reserved = await self._write(reservation)
        except BaseException:
            self.local_limiter.settle(request.id, 0)
            raise
        if reserved.outcome is not Reserved.KEPT:
            self.local_limiter.settle(request.id, 0)
            raise QuotaUnavailable("the tenant's reservation was not stored; try again")
        return replace(reservation, epoch=reserved.epoch)

    def _unavailable(
        self, request: ReservationRequest, names: Sequence[LimitName], message: str
    ) -> QuotaUnavailable:
        unknown = unknown_limits(request, names)
        if not unknown:
            return QuotaUnavailable(message)
        denial = degraded_denial(request, datetime.now(UTC), unknown=unknown)
        self.denials.remember(request.tenant_id, denial)
        return QuotaUnavailable(message, limit=unknown[0].name, level=unknown[0].level)

    async def _cancel(self, request: ReservationRequest) -> None:
        try:
            await self.counters.cancel(request.tenant_id, request.id)
        except ValkeyUnavailable as error:
            LOG.warning("will be cancelled later", admission=str(request.id), reason=str(error))
            self.cancel_later(request.tenant_id, request.id)
        except asyncio.CancelledError:
            self.cancel_later(request.tenant_id, request.id)
            raise

    def _note_overdue(self, tenant_id: UUID, overdue: int) -> None:
        if overdue:
            self.report_overdue(tenant_id)
