"""Lets one request in: by the counters and the books together, or while the counters cannot be asked by this gateway's share.

Invariant: a request is in only when the books have its reservation, under the epoch of the counters that admitted it. Who
waits may begin its work earlier, when the counters have let it in, but keeps to itself what comes of it.
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
from loraplex.tenants.admission.rejections import degraded_denial, rate_state, refusal, untold_limits
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
    not_told,
)
from loraplex.tenants.rate_state import RateState

# Together the pauses are longer than a gateway holds the lock of a seeding.
TRIES = 12
PAUSE_SECONDS = 0.01
# So many attempts leave the counters time to be replaced by whoever took the next epoch, or has it in hand.
PATIENCE = {Reserved.EPOCH_MOVED: 1, Reserved.EPOCH_LOCKED: 5}
# How long both attempts of an admission wait for Valkey, in units of `valkey_s`, which bounds one.
ASKING = 1.8
LOG = structlog.get_logger("loraplex.admission")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserver:
    """`breaker` is that of Valkey; `booking` is open from a failure of the books until they keep a reservation: meanwhile no
    work is begun that may come to nothing. `tell_overdue` hears of tenants that have leases to be reaped; `abandon`, of
    (tenant, id) that Valkey may still admit when it goes on, though the request was refused.
    """

    books: UsageLedger
    counters: Counters
    seeding: CounterRebuild
    policies: Policies
    breaker: CircuitBreaker
    booking: CircuitBreaker
    share: LocalLimiter
    denials: DenialLog
    price: Price
    gateway_id: UUID
    settings: AdmissionConfig
    tell_overdue: Callable[[UUID], None]
    abandon: Callable[[UUID, UUID], None]

    async def admit(self, request: ReservationRequest, let_in: OnProvisional = not_told) -> Reservation:
        """`let_in` is called as soon as the counters have admitted it, unless the books failed the request before.

        Raises `PolicyStale`, `LimitExceeded`, `QuotaUnavailable`, `DatabaseUnavailable`.
        """
        asked = await self._counter_request(request)
        if self.breaker.is_open:
            return await self._by_share(request, asked)
        try:
            return await self._by_counters(request, asked, let_in)
        except ValkeyUnavailable as error:
            LOG.warning("the counters did not answer", reason=str(error))
        except LimitExceeded:
            raise
        except asyncio.CancelledError:
            self.abandon(asked.tenant_id, asked.id)
            raise
        except Exception:
            await self._release(asked)
            raise
        try:
            return await self._by_share(request, asked)
        except BaseException:
            self.abandon(asked.tenant_id, asked.id)
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
        )

    async def _by_counters(
        self, request: ReservationRequest, asked: CounterReservation, let_in: OnProvisional
    ) -> Reservation:
        """Again while the counters are being seeded; an id that is still held there is not taken twice.

        Whatever it raises but `LimitExceeded`, the counters may hold the id.
        """
        for attempt in range(TRIES):
            answer = await self._ask(asked)
            if isinstance(answer, Admitted):
                if not self.booking.is_open:
                    let_in()
                periods = Periods(answer.day, answer.month)
                self._note(asked.tenant_id, answer.overdue)
                reserved = await self._reserve(self._row(request, asked, periods, answer.at, answer.epoch))
                if reserved.outcome is Reserved.KEPT:
                    rate = rate_state(answer.decisions)
                    return admission(request, asked, periods, reserved.epoch, answer.at, rate, degraded=False)
                outdated = attempt >= PATIENCE[reserved.outcome]
            else:
                self._raise_refusal(asked, answer)
                outdated = True
            if not outdated or not await self.seeding.try_seed(asked.tenant_id):
                await asyncio.sleep(PAUSE_SECONDS * (attempt + 1))
        raise self._unavailable(asked, COUNTED, "the counters of this tenant are being seeded; try again")

    def _raise_refusal(self, asked: CounterReservation, answer: CounterReply) -> None:
        """Returns only for counters that are not seeded."""
        if isinstance(answer, Denied):
            self._note(asked.tenant_id, answer.overdue)
            raise refusal(answer)
        if isinstance(answer, PolicyOutdated):
            raise PolicyStale(f"the caller's policy is older than epoch {answer.policy_epoch}")
        if not isinstance(answer, CountersMissing):
            raise InvalidField("id", f"admission {asked.id} has ended already")

    async def _reserve(self, row: LedgerReservation) -> ReservedUnder:
        """Not kept when a seeding came between: the counters that admitted it are, or will be, no longer in force. Given up
        long before a reaper may end the lease in the counters.
        """
        try:
            async with asyncio.timeout(self.settings.lease_s / 2):
                reserved = await self.books.reserve(row)
        except (TimeoutError, DatabaseUnavailable) as error:
            self.booking.failed()
            if isinstance(error, DatabaseUnavailable):
                raise
            raise DatabaseUnavailable("too many reservations wait for PostgreSQL") from error
        self.booking.close()
        if reserved.outcome is Reserved.POLICY_STALE:
            raise PolicyStale("the policy of the caller's tenant has changed meanwhile")
        return reserved

    async def _by_share(self, request: ReservationRequest, asked: CounterReservation) -> Reservation:
        if any(subject.limits.has_periods() for subject in asked.subjects):
            message = "what is left of a day's or month's quota cannot be told now; try again"
            raise self._unavailable(asked, PERIODIC, message)
        now = datetime.now(UTC)
        periods = periods_of(now)
        try:
            rate = self.share.admit(asked.id, asked.subjects, asked.tokens)
        except LimitExceeded:
            decisions = self.share.decisions(asked.subjects, asked.tokens)
            self.denials.remember(asked.tenant_id, degraded_denial(asked, now, decisions=decisions))
            raise
        try:
            reserved = await self._reserve(self._row(request, asked, periods, now, None))
        except BaseException:
            self.share.leave(asked.id, 0)
            raise
        if reserved.outcome is not Reserved.KEPT:
            self.share.leave(asked.id, 0)
            raise QuotaUnavailable("the tenant's reservation was not taken; try again")
        return admission(request, asked, periods, reserved.epoch, now, rate, degraded=True)

    def _unavailable(
        self, asked: CounterReservation, names: Sequence[LimitName], message: str
    ) -> QuotaUnavailable:
        untold = untold_limits(asked, names)
        if not untold:
            return QuotaUnavailable(message)
        self.denials.remember(asked.tenant_id, degraded_denial(asked, datetime.now(UTC), untold=untold))
        return QuotaUnavailable(message, limit=untold[0].name, level=untold[0].level)

    async def _ask(self, asked: CounterReservation) -> CounterReply:
        """Once more while the breaker is closed: a connection that Valkey has closed fails at once, and on a busy machine
        an answer may be late once. Both together wait for `ASKING` times `valkey_s`, also behind requests that Valkey
        keeps waiting.
        """
        last = asyncio.get_running_loop().time() + ASKING * self.settings.valkey_s
        try:
            return await self._ask_once(asked, last)
        except ValkeyUnavailable:
            if self.breaker.is_open:
                raise
            return await self._ask_once(asked, last)

    async def _ask_once(self, asked: CounterReservation, last: float) -> CounterReply:
        now = asyncio.get_running_loop().time()
        try:
            # A loop that was held up beyond `last` asks for a moment, too: that was not Valkey's fault.
            async with deadline(max(min(now + self.settings.valkey_s, last), now + GRACE_SECONDS)):
                answer = await self.counters.admit(asked)
        except (TimeoutError, ValkeyUnavailable) as error:
            self.breaker.failed()
            if isinstance(error, ValkeyUnavailable):
                raise
            raise ValkeyUnavailable("Valkey did not answer in time") from error
        self.breaker.succeeded()
        return answer

    async def _release(self, asked: CounterReservation) -> None:
        try:
            await self.counters.release(asked.tenant_id, asked.id)
        except ValkeyUnavailable as error:
            LOG.warning("will be released later", admission=str(asked.id), reason=str(error))
            self.abandon(asked.tenant_id, asked.id)
        except asyncio.CancelledError:
            self.abandon(asked.tenant_id, asked.id)
            raise

    def _note(self, tenant_id: UUID, overdue: int) -> None:
        if overdue:
            self.tell_overdue(tenant_id)

    def _row(
        self,
        request: ReservationRequest,
        asked: CounterReservation,
        periods: Periods,
        at: datetime,
        epoch: int | None,
    ) -> LedgerReservation:
        return LedgerReservation(
            id=asked.id,
            tenant_id=asked.tenant_id,
            api_key_id=asked.api_key_id,
            adapter_id=asked.adapter_id,
            digest=request.digest,
            gateway_id=self.gateway_id,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=request.completion_tokens,
            amount_nano=asked.amount_nano,
            day=periods.day,
            month=periods.month,
            admitted_at=at,
            lease_s=self.settings.lease_s,
            epoch=epoch,
            policy_epoch=asked.policy_epoch,
        )


def admission(
    request: ReservationRequest,
    asked: CounterReservation,
    periods: Periods,
    epoch: int | None,
    at: datetime,
    rate: RateState,
    *,
    degraded: bool,
) -> Reservation:
    hold = ReservedAmounts(
        id=asked.id,
        api_key_id=asked.api_key_id,
        adapter_id=asked.adapter_id,
        tokens=asked.tokens,
        amount_nano=asked.amount_nano,
        day=periods.day,
        month=periods.month,
        epoch=epoch,
    )
    return Reservation(
        id=asked.id,
        tenant_id=asked.tenant_id,
        hold=hold,
        adapter_version=request.adapter_version,
        digest=request.digest,
        admitted_at=at,
        rate=rate,
        degraded=degraded,
    )
