"""Reserves for one request in the counters and in the ledger, or, without the counters, by this gateway's share.

Invariant: a request is admitted only when the ledger has its reservation under the epoch of the counters that admitted it.
Until then its admission is provisional: work may start, but no part of the response may be sent.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

import structlog

from loraplex.tenants.admission.circuit_breaker import CircuitBreaker
from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.counter_rebuild import CounterRebuild
from loraplex.tenants.admission.denial_log import DenialLog
from loraplex.tenants.admission.local_limiter import LocalLimiter
from loraplex.tenants.admission.recent_refusals import RecentRefusals
from loraplex.tenants.admission.rejections import degraded_denial, rate_state, refusal, unknown_limits
from loraplex.tenants.billing.pricing import Price
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
from loraplex.tenants.quotas.periods import Periods, periods_of
from loraplex.tenants.quotas.policies import Policies
from loraplex.tenants.quotas.reservation import (
    CounterReservation,
    LedgerReservation,
    OnProvisional,
    Reservation,
    ReservationRequest,
    ReservedAmounts,
)
from loraplex.tenants.rate_state import RateState

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
    price: Price
    gateway_id: UUID
    settings: AdmissionConfig
    report_overdue: Callable[[UUID], None]
    cancel_later: Callable[[UUID, UUID], None]

    async def admit(
        self, request: ReservationRequest, on_provisional: OnProvisional | None = None
    ) -> Reservation:
        """Reserve what a request may use. `on_provisional` is called when the counters have admitted it, unless
        `ledger_breaker` is open; perhaps more than once.

        Raises `PolicyStale`, `LimitExceeded`, `QuotaUnavailable`, `DatabaseUnavailable`.
        """
        counter_request = await self._counter_request(request)
        if self.breaker.is_open:
            return await self._by_local_limiter(request, counter_request)
        try:
            return await self._by_counters(request, counter_request, on_provisional)
        except ValkeyUnavailable as error:
            LOG.warning("Valkey did not answer; admitting without the counters", reason=str(error))
        except LimitExceeded:
            raise
        except asyncio.CancelledError:
            self.cancel_later(counter_request.tenant_id, counter_request.id)
            raise
        except Exception:
            await self._cancel(counter_request)
            raise
        try:
            return await self._by_local_limiter(request, counter_request)
        except BaseException:
            self.cancel_later(counter_request.tenant_id, counter_request.id)
            raise

    async def _counter_request(self, request: ReservationRequest) -> CounterReservation:
        key = request.key
        if key.tenant_id is None or key.policy_epoch is None:
            raise InvalidField("key", "an operator's key admits no requests")
        policy = await self.policies.of(key.tenant_id, key.policy_epoch)
        return CounterReservation(
            id=request.id,
            tenant_id=key.tenant_id,
            request_id=request.request_id,
            policy_epoch=key.policy_epoch,
            subjects=policy.subjects(key.tenant_id, key.api_key_id, request.adapter_id),
            tokens=request.prompt_tokens + request.completion_tokens,
            amount_nano=self.price.bound_nano(request.prompt_tokens, request.completion_tokens),
            sequences=request.sequences,
        )

    async def _by_counters(
        self,
        request: ReservationRequest,
        counter_request: CounterReservation,
        on_provisional: OnProvisional | None,
    ) -> Reservation:
        """Reserve in the counters, then in the ledger; again while the counters are rebuilt. An id is reserved once.

        After any error but `LimitExceeded`, the counters may have a reservation of this id.
        """
        for attempt in range(TRIES):
            asked_at = self.recent_refusals.now()
            reply = await self._call_counters(counter_request)
            if isinstance(reply, Admitted):
                if on_provisional is not None and not self.ledger_breaker.is_open:
                    on_provisional()
                periods = Periods(reply.day, reply.month)
                self._note_overdue(counter_request.tenant_id, reply.overdue)
                reserved = await self._reserve(
                    self._row(request, counter_request, periods, reply.at, reply.epoch)
                )
                if reserved.outcome is Reserved.KEPT:
                    rate = rate_state(reply.decisions)
                    return reservation_of(
                        request, counter_request, periods, reserved.epoch, reply.at, rate, degraded=False
                    )
                outdated = attempt >= RETRIES_BEFORE_REBUILD[reserved.outcome]
            else:
                self._raise_refusal(counter_request, reply, asked_at)
                outdated = True
            if not outdated or not await self.counter_rebuild.try_rebuild(counter_request.tenant_id):
                await asyncio.sleep(PAUSE_SECONDS * (attempt + 1))
        raise self._unavailable(
            counter_request, COUNTED, "the counters of this tenant are being rebuilt; try again"
        )

    def _raise_refusal(
        self, counter_request: CounterReservation, reply: CounterReply, asked_at: float
    ) -> None:
        """Raise what a refusal means. Returns only for `CountersMissing`."""
        if isinstance(reply, Denied):
            self._note_overdue(counter_request.tenant_id, reply.overdue)
            self.recent_refusals.remember(counter_request, reply, asked_at)
            raise refusal(reply)
        if isinstance(reply, PolicyOutdated):
            raise PolicyStale(f"the caller's policy is older than epoch {reply.policy_epoch}")
        if not isinstance(reply, CountersMissing):
            raise InvalidField("id", f"admission {counter_request.id} has ended already")

    async def _reserve(self, row: LedgerReservation) -> ReservedUnder:
        """Write the reservation to the ledger; gives up long before a reaper may end the lease in the counters.

        The outcome is not `KEPT` if a rebuild took the next epoch meanwhile: the counters that admitted it are outdated.
        """
        try:
            async with asyncio.timeout(self.settings.lease_s / 2):
                reserved = await self.ledger.reserve(row)
        except (TimeoutError, DatabaseUnavailable) as error:
            self.ledger_breaker.failed()
            if isinstance(error, DatabaseUnavailable):
                raise
            raise DatabaseUnavailable("too many reservations wait for PostgreSQL") from error
        self.ledger_breaker.close()
        if reserved.outcome is Reserved.POLICY_STALE:
            raise PolicyStale("the policy of the caller's tenant has changed meanwhile")
        return reserved

    async def _by_local_limiter(
        self, request: ReservationRequest, counter_request: CounterReservation
    ) -> Reservation:
        """Reserve by this gateway's share, then in the ledger. Refuses tenants with a limit per day or month."""
        if any(subject.limits.has_periods() for subject in counter_request.subjects):
            message = "what is left of a day's or month's quota is unknown now; try again"
            raise self._unavailable(counter_request, PERIODIC, message)
        now = datetime.now(UTC)
        periods = periods_of(now)
        asked = counter_request.subjects, counter_request.tokens, counter_request.sequences
        try:
            rate = self.local_limiter.admit(counter_request.id, *asked)
        except LimitExceeded:
            decisions = self.local_limiter.decisions(*asked)
            self.denials.remember(
                counter_request.tenant_id, degraded_denial(counter_request, now, decisions=decisions)
            )
            raise
        try:
            reserved = await self._reserve(self._row(request, counter_request, periods, now, None))
        except BaseException:
            self.local_limiter.settle(counter_request.id, 0)
            raise
        if reserved.outcome is not Reserved.KEPT:
            self.local_limiter.settle(counter_request.id, 0)
            raise QuotaUnavailable("the tenant's reservation was not stored; try again")
        return reservation_of(request, counter_request, periods, reserved.epoch, now, rate, degraded=True)

    def _unavailable(
        self, counter_request: CounterReservation, names: Sequence[LimitName], message: str
    ) -> QuotaUnavailable:
        unknown = unknown_limits(counter_request, names)
        if not unknown:
            return QuotaUnavailable(message)
        self.denials.remember(
            counter_request.tenant_id, degraded_denial(counter_request, datetime.now(UTC), unknown=unknown)
        )
        return QuotaUnavailable(message, limit=unknown[0].name, level=unknown[0].level)

    async def _call_counters(self, counter_request: CounterReservation) -> CounterReply:
        """Call the counters, twice while the breaker is closed: a closed connection fails at once, and on a busy machine one
        reply may be late. Both attempts together wait `TOTAL_WAIT` times `valkey_s`, including the wait for a connection.
        """
        last = asyncio.get_running_loop().time() + TOTAL_WAIT * self.settings.valkey_s
        try:
            return await self._call_counters_once(counter_request, last)
        except ValkeyUnavailable:
            if self.breaker.is_open:
                raise
            return await self._call_counters_once(counter_request, last)

    async def _call_counters_once(self, counter_request: CounterReservation, last: float) -> CounterReply:
        now = asyncio.get_running_loop().time()
        try:
            # An event loop that was blocked beyond `last` still waits a moment: the delay was not Valkey's.
            async with deadline(max(min(now + self.settings.valkey_s, last), now + GRACE_SECONDS)):
                reply = await self.counters.admit(counter_request)
        except (TimeoutError, ValkeyUnavailable) as error:
            self.breaker.failed()
            if isinstance(error, ValkeyUnavailable):
                raise
            raise ValkeyUnavailable("Valkey did not answer in time") from error
        self.breaker.succeeded()
        return reply

    async def _cancel(self, counter_request: CounterReservation) -> None:
        try:
            await self.counters.cancel(counter_request.tenant_id, counter_request.id)
        except ValkeyUnavailable as error:
            LOG.warning("will be cancelled later", admission=str(counter_request.id), reason=str(error))
            self.cancel_later(counter_request.tenant_id, counter_request.id)
        except asyncio.CancelledError:
            self.cancel_later(counter_request.tenant_id, counter_request.id)
            raise

    def _note_overdue(self, tenant_id: UUID, overdue: int) -> None:
        if overdue:
            self.report_overdue(tenant_id)

    def _row(
        self,
        request: ReservationRequest,
        counter_request: CounterReservation,
        periods: Periods,
        at: datetime,
        epoch: int | None,
    ) -> LedgerReservation:
        return LedgerReservation(
            id=counter_request.id,
            tenant_id=counter_request.tenant_id,
            api_key_id=counter_request.api_key_id,
            adapter_id=counter_request.adapter_id,
            digest=request.digest,
            gateway_id=self.gateway_id,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=request.completion_tokens,
            amount_nano=counter_request.amount_nano,
            day=periods.day,
            month=periods.month,
            admitted_at=at,
            lease_s=self.settings.lease_s,
            epoch=epoch,
            policy_epoch=counter_request.policy_epoch,
            sequences=counter_request.sequences,
        )


def reservation_of(
    request: ReservationRequest,
    counter_request: CounterReservation,
    periods: Periods,
    epoch: int | None,
    at: datetime,
    rate: RateState,
    *,
    degraded: bool,
) -> Reservation:
    reserved = ReservedAmounts(
        id=counter_request.id,
        api_key_id=counter_request.api_key_id,
        adapter_id=counter_request.adapter_id,
        tokens=counter_request.tokens,
        amount_nano=counter_request.amount_nano,
        day=periods.day,
        month=periods.month,
        epoch=epoch,
        sequences=counter_request.sequences,
    )
    return Reservation(
        id=counter_request.id,
        tenant_id=counter_request.tenant_id,
        reserved=reserved,
        adapter_version=request.adapter_version,
        digest=request.digest,
        admitted_at=at,
        rate=rate,
        degraded=degraded,
    )
