"""What an admission reserves at which price, and how long it waits for a Valkey that does not reply, on an artificial clock."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from tests.tenants.admission.memory_journal import MemoryJournal
from tests.tenants.artificial_time import run, running_loop
from tests.tenants.billing.fixed_prices import EVER, fixed_prices, fixed_version
from tests.tenants.counters.silence import reply_of

from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.denial_log import DenialLog
from loraplex.tenants.admission.local_limiter import LocalLimiter
from loraplex.tenants.admission.recent_refusals import RecentRefusals
from loraplex.tenants.admission.reserve import PERIODIC_WAIT_SECONDS, Reserver
from loraplex.tenants.billing.price_book import PriceBook
from loraplex.tenants.billing.price_table import CardKey, CardVersions, PriceTable
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.circuit_breaker import FAILURES, CircuitBreaker
from loraplex.tenants.counters.counter_replies import Admitted
from loraplex.tenants.counters.pipelined_commands import BUSY_SECONDS, ReplyClock
from loraplex.tenants.errors import PriceMissing, QuotaUnavailable, ValkeyUnavailable
from loraplex.tenants.ids import uuid7
from loraplex.tenants.periods import periods_of
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.quotas.policies import TenantPolicy
from loraplex.tenants.quotas.reservation import Reservation, ReservationRequest

CALLERS, CALLS = 16, 20
BOUND_S, PAUSE_S = 0.1, 0.06
TENANT, KEY = uuid4(), uuid4()


async def hang(_: ReservationRequest) -> Any:
    await asyncio.Event().wait()


async def refuse(_: ReservationRequest) -> Any:
    raise ValkeyUnavailable("connection refused")


async def be_slow_to_refuse(_: ReservationRequest) -> Any:
    """As a connection that breaks just before it would be given up."""
    await asyncio.sleep(0.049)
    raise ValkeyUnavailable("connection reset")


@dataclass
class StubStores:
    """Counters that do what `respond` does, and a ledger that stores everything at once."""

    respond: Callable[[ReservationRequest], Coroutine[Any, Any, Any]]
    limits: QuotaLimits = field(default_factory=QuotaLimits)
    calls: int = 0
    cancelled: list[UUID] = field(default_factory=list)
    replies: ReplyClock = field(default_factory=ReplyClock)

    async def cancel(self, tenant_id: UUID, request_id: UUID) -> None:
        self.cancelled.append(request_id)

    async def reserve(self, request: ReservationRequest, wait_s: float) -> Any:
        self.calls += 1
        try:
            return await reply_of(self.respond(request), wait_s, self.replies)
        except TimeoutError as error:
            raise ValkeyUnavailable("no answer in time") from error

    async def store(self, *_: Any) -> int:
        return 1

    async def nothing(self, *_: Any) -> None:
        return None

    async def of(self, tenant_id: UUID, policy_epoch: int) -> TenantPolicy:
        return TenantPolicy(policy_epoch, self.limits)

    def reserver(self, prices: PriceBook | None = None) -> Reserver:
        stores: Any = SimpleNamespace(
            reserve=self.reserve,
            of=self.of,
            cancel=self.cancel,
        )
        ledger: Any = SimpleNamespace(reserve_without_counters=self.store)
        fences: Any = SimpleNamespace(
            ready=self.nothing, outdated=lambda *_: False, require_policy=lambda *_: None
        )
        return Reserver(
            ledger=ledger,
            counters=stores,
            counter_rebuild=stores,
            policies=stores,
            breaker=CircuitBreaker(clock=running_loop().time),
            journal=MemoryJournal(),
            fences=fences,
            denials=DenialLog(),
            recent_refusals=RecentRefusals(running_loop().time),
            local_limiter=LocalLimiter(running_loop().time),
            prices=prices or fixed_prices(Price()),
            gateway_id=uuid4(),
            settings=AdmissionConfig(),
            report_overdue=lambda _: None,
            cancel_later=lambda *_: None,
            withdraw=self.nothing,
            withdraw_later=lambda _: None,
        )


def request() -> ReservationRequest:
    return ReservationRequest(
        id=uuid7(), tenant_id=TENANT, api_key_id=KEY, policy_epoch=1, prompt_tokens=1, completion_tokens=1
    )


async def waits_of(stores: StubStores) -> list[float]:
    """The waits of `CALLERS` concurrent callers with `CALLS` calls each."""
    reserver, waits = stores.reserver(), list[float]()

    async def call() -> None:
        for _ in range(CALLS):
            begun = running_loop().time()
            try:
                assert (await reserver.reserve(request())).degraded
            except QuotaUnavailable:
                assert stores.limits.has_periods()
            waits.append(running_loop().time() - begun)

    await asyncio.gather(*(call() for _ in range(CALLERS)))
    assert reserver.breaker.is_open
    return waits


@pytest.mark.parametrize(
    ("limits", "bound_s"),
    [(QuotaLimits(), 0.9 * BOUND_S), (QuotaLimits(tokens_per_day=5), BOUND_S / 2 + PERIODIC_WAIT_SECONDS)],
    ids=["rates", "budgets"],
)
@pytest.mark.parametrize("respond", [hang, refuse, be_slow_to_refuse])
def test_no_admission_waits_longer_than_the_bound(
    respond: Callable[[ReservationRequest], Coroutine[Any, Any, Any]], limits: QuotaLimits, bound_s: float
) -> None:
    stores = StubStores(respond, limits)
    waits = run(waits_of(stores))
    assert len(waits) == CALLERS * CALLS
    assert max(waits) <= bound_s + 1e-6
    # Three failures one after the other, each beside those of all callers; no later call.
    assert sum(wait > 0 for wait in waits) < FAILURES * CALLERS and stores.calls <= FAILURES * CALLERS


@pytest.mark.parametrize(
    ("limits", "degraded"), [(QuotaLimits(), True), (QuotaLimits(tokens_per_day=5), False)]
)
def test_a_budget_waits_for_a_late_reply_that_a_rate_goes_without(
    limits: QuotaLimits, degraded: bool
) -> None:
    """A busy machine: an engine that loads its model beside Valkey."""

    async def answer_late(asked: ReservationRequest) -> Admitted:
        await asyncio.sleep(0.9 * PERIODIC_WAIT_SECONDS)
        return await admitted_at(datetime.now(UTC))(asked)

    async def reserve() -> Reservation:
        return await StubStores(answer_late, limits).reserver().reserve(request())

    assert run(reserve()).degraded == degraded


def test_a_pause_that_all_callers_meet_opens_no_breaker() -> None:
    async def answer_after_the_pause(asked: ReservationRequest) -> Admitted:
        await asyncio.sleep(max(0.0, PAUSE_S - running_loop().time()))
        return await admitted_at(datetime.now(UTC))(asked)

    async def reserve_at_once() -> None:
        reserver = StubStores(answer_after_the_pause).reserver()
        reservations = await asyncio.gather(*(reserver.reserve(request()) for _ in range(CALLERS)))
        assert not any(each.degraded for each in reservations)
        assert not reserver.breaker.is_open

    run(reserve_at_once())


@pytest.mark.parametrize(("reply_s", "admitted"), [(0.04, CALLERS), (0.1, 0)])
def test_callers_wait_for_counters_that_answer_one_after_the_other(reply_s: float, admitted: int) -> None:
    """16 replies take 0.64 s, and each caller waits for its own while replies come within 50 ms of each other."""
    turn = asyncio.Lock()

    async def answer_in_turn(asked: ReservationRequest) -> Admitted:
        async with turn:
            await asyncio.sleep(reply_s)
        stores.replies.read_at = running_loop().time()
        return await admitted_at(datetime.now(UTC))(asked)

    stores = StubStores(answer_in_turn)

    async def reserve_at_once() -> list[Reservation]:
        reserver = stores.reserver()
        return await asyncio.gather(*(reserver.reserve(request()) for _ in range(CALLERS)))

    assert CALLERS * 0.04 < BUSY_SECONDS
    assert sum(not each.degraded for each in run(reserve_at_once())) == admitted


def admitted_at(at: datetime) -> Callable[[ReservationRequest], Coroutine[Any, Any, Admitted]]:
    """Counters that admit everything, by a clock of their own."""

    async def admit(_: ReservationRequest) -> Admitted:
        periods = periods_of(at)
        return Admitted(
            epoch=1, at=at, day=periods.day, month=periods.month, decisions=(), overdue=0, repeated=False
        )

    return admit


def price_rises(at: datetime) -> PriceBook:
    versions = fixed_version(Price(prompt=1_000)), fixed_version(Price(prompt=2_000))
    card = CardVersions((EVER, at), versions)
    return PriceBook(PriceTable(cards={CardKey(None, None, None, "USD"): card}, default_currency="USD"))


async def reserved(stores: StubStores, prices: PriceBook, asked: ReservationRequest) -> Reservation:
    return await stores.reserver(prices).reserve(asked)


@pytest.mark.parametrize(("after", "price"), [(-timedelta(microseconds=1), 1_000), (timedelta(0), 2_000)])
def test_the_counters_clock_chooses_the_price_and_the_dearest_near_is_reserved(
    after: timedelta, price: int
) -> None:
    rises = datetime.now(UTC)
    reservation = run(reserved(StubStores(admitted_at(rises + after)), price_rises(rises), request()))
    assert reservation.price.price.prompt == price
    assert reservation.request.amount_nano == 2


def test_a_price_above_what_is_reserved_is_refused() -> None:
    """A counters' clock that is far ahead may meet a price that the bound does not include."""
    rises = datetime.now(UTC) + timedelta(hours=1)
    stores, asked = StubStores(admitted_at(rises)), request()
    with pytest.raises(QuotaUnavailable, match="the price rose"):
        run(reserved(stores, price_rises(rises), asked))
    assert stores.cancelled == [asked.id]


def test_without_a_card_in_its_currency_a_request_is_refused_before_the_counters() -> None:
    stores = StubStores(admitted_at(datetime.now(UTC)))
    with pytest.raises(PriceMissing, match="no price in EUR"):
        run(reserved(stores, PriceBook(PriceTable(default_currency="EUR")), request()))
    assert stores.calls == 0
