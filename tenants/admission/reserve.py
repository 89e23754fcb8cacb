"""Reserves for one request in the counters and in the journal, or, without the counters, by this gateway's share.

Invariant: a request is admitted only when the journal has its reservation, and no fence has outdated the counters that
admitted it. Until then its admission is provisional: work may start, but no part of the response may be sent.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from uuid import UUID

import structlog

from loraplex.tenants.admission.allowance import CompletionAllowance, completion_tokens_within, within
from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.counter_rebuild import CounterRebuild
from loraplex.tenants.admission.denial_log import DenialLog
from loraplex.tenants.admission.fences import Fences
from loraplex.tenants.admission.local_limiter import LocalLimiter
from loraplex.tenants.admission.recent_refusals import RecentRefusals
from loraplex.tenants.admission.rejections import (
    met_limits,
    rate_state,
    refusal,
    unknown_limits,
)
from loraplex.tenants.billing.price_book import PriceBook
from loraplex.tenants.billing.pricing import PriceVersion
from loraplex.tenants.circuit_breaker import CircuitBreaker
from loraplex.tenants.counters.counter_replies import (
    Admitted,
    CounterReply,
    CountersMissing,
    Decision,
    Denied,
    Explanation,
    PolicyOutdated,
    UnknownLimit,
)
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.errors import (
    CountersNewer,
    DatabaseUnavailable,
    InvalidField,
    JournalFull,
    JournalUnavailable,
    LimitExceeded,
    PolicyStale,
    QuotaUnavailable,
    StoreUnavailable,
    ValkeyUnavailable,
)
from loraplex.tenants.ids import uuid7
from loraplex.tenants.ledger.journal.journal import Journal
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.periods import periods_of
from loraplex.tenants.quotas.limits import COUNTED, PER_SESSION, PERIODIC, LimitName
from loraplex.tenants.quotas.policies import Policies
from loraplex.tenants.quotas.reservation import OnProvisional, Reservation, ReservationRequest

# Together the pauses are longer than the lock of a rebuild lives.
TRIES = 22
PAUSE_SECONDS = 0.01
# The wait of a second attempt, in units of `valkey_s`, which bounds the first.
SECOND_WAIT = 0.8
# The same in seconds for a request that could only be refused without the counters: on a busy machine replies are that late.
# Shorter than the timeouts of the client, and than the time that a connection which others have given up stays open.
PERIODIC_WAIT_SECONDS = 0.9
STALLED = "the disk of this server's usage journal does not answer; try again later"
LOG = structlog.get_logger("loraplex.admission")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserver:
    """Reserves for the requests of one gateway.

    `breaker` is Valkey's. `report_overdue` gets each tenant with expired leases. `cancel_later` gets (tenant, id) of a refused
    request that Valkey may still admit. `withdraw` gets a reservation that is in the journal and was not admitted, `withdraw_later`
    one that may come into it yet.
    """

    ledger: UsageLedger
    counters: Counters
    counter_rebuild: CounterRebuild
    policies: Policies
    breaker: CircuitBreaker
    journal: Journal
    fences: Fences
    local_limiter: LocalLimiter
    denials: DenialLog
    recent_refusals: RecentRefusals
    prices: PriceBook
    gateway_id: UUID
    settings: AdmissionConfig
    report_overdue: Callable[[UUID], None]
    cancel_later: Callable[[UUID, UUID], None]
    withdraw: Callable[[Reservation], Awaitable[None]]
    withdraw_later: Callable[[Reservation], None]

    async def reserve(
        self, request: ReservationRequest, on_provisional: OnProvisional | None = None
    ) -> Reservation:
        """Reserve what a request may use. `on_provisional` is called when the counters have admitted it; perhaps more than
        once. The reservation has a new id if a fence came in between.

        The counters are called twice in a row while the breaker is closed: a closed connection fails at once, and on a busy
        machine one reply may be late. Raises `PolicyStale`, `LimitExceeded`, `PriceMissing`, and subclasses of `StoreUnavailable`.
        """
        if self.journal.is_full:
            raise JournalFull("this server's usage journal is full; nothing more is admitted")
        if self.journal_stalls:
            raise JournalUnavailable(STALLED)
        await self.fences.ready()
        self.fences.require_policy(request.tenant_id, request.policy_epoch)
        await self._bound(request)
        if self.breaker.is_open:
            return await self._by_local_limiter(request)
        while True:
            try:
                admitted = await self._by_counters(request, on_provisional)
            except ValkeyUnavailable as error:
                LOG.warning("Valkey did not answer; admitting without the counters", reason=str(error))
                return await self._without_counters(request)
            except CountersNewer:
                return await self._by_local_limiter(request)
            except LimitExceeded:
                raise
            except asyncio.CancelledError:
                self.cancel_later(request.tenant_id, request.id)
                raise
            except Exception:
                await self._cancel(request)
                raise
            await self._in_journal(admitted)
            if not self._is_outdated(admitted):
                return admitted
            await self.withdraw(admitted)
            request = replace(request, id=uuid7())

    @property
    def journal_stalls(self) -> bool:
        """Whether the disk of the journal has not finished a transaction for so long that an admission would not wait for it."""
        return self.journal.stalled_s > self.settings.journal_s

    async def allowance(self, request: ReservationRequest, *, unused: bool = False) -> CompletionAllowance:
        """What a request with these prompts may have of completions; `unused`: within what is left of days and months.

        Raises as `reserve` does for its policy and its price, and `ValkeyUnavailable` or `CountersNewer` with `unused`.
        """
        policy = await self.policies.of(request.tenant_id, request.policy_epoch)
        subjects = policy.subjects(request.tenant_id, request.api_key_id, request.adapter_id)
        uses = await self.counters.read(request.tenant_id, subjects, request.session) if unused else None
        in_session = request.session is not None
        tokens = completion_tokens_within(
            [within(subject, uses or (), in_session=in_session) for subject in subjects],
            request.prompt_tokens,
            self.local_limiter.share if self.breaker.is_open else int,
            partial(self._prices_near, request),
        )
        return CompletionAllowance(policy.tenant.default_max_tokens, tokens, policy.unknown_parameters)

    async def _by_counters(
        self, request: ReservationRequest, on_provisional: OnProvisional | None
    ) -> Reservation:
        """Ask until counters that no fence has outdated admit the request. Raises `ValkeyUnavailable` and what refuses it.

        What the counters may have of a request that fails is to be cancelled; a denial took nothing, nor did counters that this
        gateway may not touch.
        """
        first_wait_s = self.settings.valkey_s
        wait_s, is_second = first_wait_s, False
        for attempt in range(TRIES):
            asked_at, began = self.recent_refusals.now(), self.breaker.clock()
            try:
                reply = await self.counters.reserve(request, wait_s)
            except ValkeyUnavailable:
                self.breaker.failed(began)
                if not is_second and not self.breaker.is_open:
                    wait_s, is_second = self._second_wait_s(request), True
                    continue
                raise
            wait_s, is_second = first_wait_s, False
            self.breaker.succeeded()
            if isinstance(reply, Admitted):
                reservation = self._admitted(request, reply)
                if not self._is_outdated(reservation):
                    if on_provisional is not None:
                        on_provisional()
                    return reservation
            else:
                self._raise_refusal(request, reply, asked_at)
            # The gateway that raised the fence needs time to replace outdated counters.
            waits = isinstance(reply, Admitted) and not attempt
            if waits or not await self.counter_rebuild.try_rebuild(request.tenant_id):
                await asyncio.sleep(PAUSE_SECONDS * (attempt + 1))
        raise self._unavailable(request, COUNTED, "the counters of this tenant are being rebuilt; try again")

    def _second_wait_s(self, request: ReservationRequest) -> float:
        short_s = SECOND_WAIT * self.settings.valkey_s
        return max(short_s, PERIODIC_WAIT_SECONDS) if request.has_periods else short_s

    async def _in_journal(self, reservation: Reservation) -> None:
        """Make the reservation durable. One that the journal refuses is cancelled in the counters.

        One that it does not answer in time may be written yet, and is withdrawn once the disk answers again.
        """
        try:
            async with asyncio.timeout(self.settings.journal_s):
                await self.journal.admit(reservation)
        except TimeoutError as error:
            self.withdraw_later(reservation)
            await self._cancel(reservation.request)
            raise JournalUnavailable(STALLED) from error
        except StoreUnavailable:
            await self._cancel(reservation.request)
            raise
        except asyncio.CancelledError:
            await self.withdraw(reservation)
            raise

    def _is_outdated(self, reservation: Reservation) -> bool:
        epoch = reservation.epoch
        return epoch is not None and self.fences.outdated(reservation.tenant_id, epoch)

    async def _bound(self, request: ReservationRequest) -> None:
        """Set the limits that the request counts for, and the most it can cost."""
        policy = await self.policies.of(request.tenant_id, request.policy_epoch)
        tokens = request.prompt_tokens, request.completion_tokens
        request.bound(
            policy.subjects(request.tenant_id, request.api_key_id, request.adapter_id),
            policy.roots.get(request.api_key_id),
            max([each.price.bound_nano(*tokens) for each in self._prices_near(request)]),
        )

    def _prices_near(self, request: ReservationRequest) -> list[PriceVersion]:
        """Return the prices that the counters may give the request, whose clock decides when it is admitted."""
        now = datetime.now(UTC)
        return self.prices.table.prices_near(request.tenant_id, request.tier, request.adapter_name, now)

    def _price(self, request: ReservationRequest, admitted_at: datetime) -> PriceVersion:
        """Return the price at the time of admission. A card that began after the bound was taken may exceed what is reserved."""
        chosen = self.prices.table.price(request.tenant_id, request.tier, request.adapter_name, admitted_at)
        if chosen.price.bound_nano(request.prompt_tokens, request.completion_tokens) > request.amount_nano:
            raise QuotaUnavailable("the price rose while this request was admitted; try again")
        return chosen

    def _admitted(self, request: ReservationRequest, reply: Admitted) -> Reservation:
        price = self._price(request, reply.at)
        if reply.overdue:
            self.report_overdue(request.tenant_id)
        return Reservation(
            request=request,
            day=reply.day,
            month=reply.month,
            admitted_at=reply.at,
            price=price,
            epoch=reply.epoch,
            rate=rate_state(reply.decisions),
            limits=met_limits(reply.decisions),
        )

    def _raise_refusal(self, request: ReservationRequest, reply: CounterReply, asked_at: float) -> None:
        """Raise what a refusal means. Returns only for `CountersMissing`."""
        if isinstance(reply, Denied):
            if reply.overdue:
                self.report_overdue(request.tenant_id)
            self.recent_refusals.remember(request, reply, asked_at)
            raise refusal(reply)
        if isinstance(reply, PolicyOutdated):
            raise PolicyStale(f"the caller's policy is older than epoch {reply.policy_epoch}")
        if not isinstance(reply, CountersMissing):
            raise InvalidField("id", f"admission {request.id} has ended already")

    async def _without_counters(self, request: ReservationRequest) -> Reservation:
        """Reserve by this gateway's share. The counters may still admit the request, so a refused one is cancelled there."""
        try:
            return await self._by_local_limiter(request)
        except BaseException:
            self.cancel_later(request.tenant_id, request.id)
            raise

    async def _by_local_limiter(self, request: ReservationRequest) -> Reservation:
        """Reserve by this gateway's share, in the ledger, then in the journal. Refuses tenants with a limit per day or
        month, and requests of a session whose tokens are limited.

        No counters know the request, so the ledger must have it before any later rebuild.
        """
        if request.has_periods:
            message = "what is left of a day's, month's or session's quota is unknown now; try again"
            raise self._unavailable(request, (*PERIODIC, PER_SESSION), message)
        now = datetime.now(UTC)
        periods, price = periods_of(now), self._price(request, now)
        asked = request.subjects, request.tokens, request.sequences
        decisions = self.local_limiter.decisions(*asked)
        try:
            rate = self.local_limiter.admit(request.id, *asked)
        except LimitExceeded:
            self._deny(request, now, decisions=decisions)
            raise
        reservation = Reservation(
            request=request,
            day=periods.day,
            month=periods.month,
            admitted_at=now,
            price=price,
            rate=rate,
            limits=met_limits(decisions),
            degraded=True,
        )
        try:
            reservation = await self._in_ledger(reservation)
            await self._in_journal(reservation)
        except BaseException:
            self.local_limiter.settle(request.id, 0)
            raise
        return reservation

    async def _in_ledger(self, reservation: Reservation) -> Reservation:
        """Store the reservation; return it with the tenant's epoch. Gives up long before a reaper may end its lease."""
        lease_s = self.settings.lease_s
        try:
            async with asyncio.timeout(lease_s / 2):
                epoch = await self.ledger.reserve_without_counters(reservation, self.gateway_id, lease_s)
        except TimeoutError as error:
            raise DatabaseUnavailable("too many reservations wait for PostgreSQL") from error
        if epoch is None:
            raise PolicyStale("the policy of the caller's tenant has changed meanwhile")
        return replace(reservation, epoch=epoch)

    def _unavailable(
        self, request: ReservationRequest, names: Sequence[LimitName], message: str
    ) -> QuotaUnavailable:
        unknown = unknown_limits(request, names)
        if not unknown:
            return QuotaUnavailable(message)
        self._deny(request, datetime.now(UTC), unknown=unknown)
        return QuotaUnavailable(message, limit=unknown[0].name, level=unknown[0].level)

    def _deny(
        self,
        request: ReservationRequest,
        at: datetime,
        decisions: tuple[Decision, ...] = (),
        unknown: tuple[UnknownLimit, ...] = (),
    ) -> None:
        """Keep why this gateway refused a request without the counters."""
        explanation = Explanation(
            request_id=request.request_id, at=at, decisions=decisions, unknown=unknown, degraded=True
        )
        self.denials.remember(request.tenant_id, explanation)

    async def _cancel(self, request: ReservationRequest) -> None:
        try:
            with suppress(CountersNewer):
                await self.counters.cancel(request.tenant_id, request.id)
        except ValkeyUnavailable as error:
            LOG.warning("will be cancelled later", admission=str(request.id), reason=str(error))
            self.cancel_later(request.tenant_id, request.id)
        except asyncio.CancelledError:
            self.cancel_later(request.tenant_id, request.id)
            raise
