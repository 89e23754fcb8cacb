"""Limits under random rebuilds of two gateways, of a key and one below it: fences, journals that are shipped late, ends that the counters know early,
snapshots delivered late or never, counters that are lost. The ledger and the journals are models, the counters are real.

Each of six rules that is left out is found: `MUTATIONS`.
"""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from uuid import UUID

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis
from tests.tenants.counters.counter_model import CounterModel, ModelRequest
from tests.tenants.counters.limited_tenant import POLICY, LimitedTenant, age, keys_of, reserved_of, usage_of

from loraplex.tenants.counters.counter_replies import Admitted, CountersMissing, Denied
from loraplex.tenants.counters.counters import LEASE_S, Counters
from loraplex.tenants.counters.snapshot import CounterSnapshot
from loraplex.tenants.quotas.limits import NO_LIMITS, QuotaLimits
from loraplex.tenants.quotas.reservation import NOTHING_USED, ReservationRequest, SettledUsage
from loraplex.tenants.valkey import open_valkey

Answer = TypeVar("Answer")
# Tight, so that whatever is missed shows.
RATES = (QuotaLimits(tokens_per_minute=60), QuotaLimits(requests_per_minute=6, tokens_per_minute=80))
DAYS = (QuotaLimits(tokens_per_day=100), QuotaLimits(tokens_per_day=160), QuotaLimits(tokens_per_day=300))
SETTINGS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[*HealthCheck],
)


@dataclass
class ModelLedger:
    """PostgreSQL: the tenant's epoch and fence, its open requests, and those with a record. `fences` has the epoch up to which
    each fence outdates counters, the first fence first.
    """

    epoch: int = 0
    fences: list[int] = field(default_factory=list)
    open: dict[UUID, ModelRequest] = field(default_factory=dict)
    ended: dict[UUID, ModelRequest] = field(default_factory=dict)

    def raise_fence(self) -> None:
        self.fences.append(self.epoch)

    @property
    def fence(self) -> int:
        return len(self.fences)

    @property
    def fenced_epoch(self) -> int:
        return self.fences[-1] if self.fences else 0

    def snapshot(self, tenant: LimitedTenant) -> CounterSnapshot:
        model = CounterModel({**self.open, **self.ended})
        totals = model.totals([*tenant.subjects])
        known = tuple(each for each in totals if each.tokens)
        reservations = tuple(each.reserved for each in self.open.values())
        return CounterSnapshot(
            policy_epoch=POLICY,
            totals=known,
            reservations=reservations,
            full_buckets=self.epoch == 1,
        )


@dataclass
class ModelJournal:
    """A gateway: the fence that it has seen, and the records that it has not shipped; `None`: a request was cancelled.

    `early`: the epochs of the counters that knew an end before the ledger.
    """

    fenced_epoch: int = 0
    seen: int = 0
    to_ship: int = 0
    written: int = 0
    records: list[tuple[ModelRequest, SettledUsage | None]] = field(default_factory=list)
    early: dict[UUID, int] = field(default_factory=dict)

    def write(self, request: ModelRequest, usage: SettledUsage | None = None) -> None:
        self.records.append((request, usage))
        self.written += 1

    def see(self, ledger: ModelLedger) -> None:
        self.fenced_epoch, self.seen, self.to_ship = ledger.fenced_epoch, ledger.fence, self.written

    def has_confirmed(self, fence: int) -> bool:
        return self.seen >= fence and self.written - len(self.records) >= self.to_ship


class EpochMachine(RuleBasedStateMachine):
    """`taken`: snapshots not delivered yet. `pending_updates`: ends that are shipped and that the counters may not know, each with
    the ledger's epoch when it was written. `refused`: admitted by counters that a fence has outdated. `early`: ends that the
    counters do not know yet.
    """

    url: str
    limits: tuple[QuotaLimits, ...]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.client, self.counters = self.run(connect(self.url))
        self.tenant = self.child = LimitedTenant()
        self.model = CounterModel()
        self.ledger = ModelLedger()
        self.gateways = [ModelJournal(), ModelJournal()]
        self.owners: dict[UUID, ModelJournal] = {}
        self.taken: list[tuple[int, CounterSnapshot]] = []
        self.pending_updates: list[tuple[ModelRequest, SettledUsage, int]] = []
        self.refused: list[ReservationRequest] = []
        self.early: list[ModelRequest] = []
        self.passed_s = 0.0

    @initialize(data=st.data())
    def have_limits(self, data: st.DataObject) -> None:
        tenant, key = (data.draw(st.sampled_from(each)) for each in (self.limits, (NO_LIMITS, *self.limits)))
        self.tenant = LimitedTenant(tenant, key)
        self.child = self.tenant.child()

    @rule(
        gateway=st.integers(0, 1),
        tokens=st.sampled_from([20, 30, 60]),
        times=st.sampled_from([1, 2, 8]),
        overtaken=st.booleans(),
    )
    def admit(self, gateway: int, tokens: int, times: int, overtaken: bool) -> None:
        """Often all that the limits leave, so that what is missed shows at the next admission."""
        for _ in range(times):
            if not self.ask(self.gateways[gateway], self.request(tokens), overtaken):
                return

    @precondition(lambda self: self.refused)
    @rule(data=st.data(), gateway=st.integers(0, 1))
    def ask_again(self, data: st.DataObject, gateway: int) -> None:
        self.ask(self.gateways[gateway], self.draw(data, self.refused), False)

    @precondition(lambda self: self.refused)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.run(self.counters.cancel(self.tenant.tenant_id, self.draw(data, self.refused).id))

    @precondition(lambda self: self.model.open())
    @rule(data=st.data(), part=st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.0]))
    def end(self, data: st.DataObject, part: float) -> None:
        self.end_of(data.draw(st.sampled_from(self.model.open())), part)

    @precondition(lambda self: self.early)
    @rule(data=st.data())
    def settle_early(self, data: st.DataObject) -> None:
        """Perhaps after the end was shipped."""
        self.settle_early_of(self.draw(data, self.early))

    @rule(gateway=st.integers(0, 1), records=st.integers(1, 4))
    def ship(self, gateway: int, records: int) -> None:
        self.ship_of(self.gateways[gateway], records)

    @rule(gateway=st.integers(0, 1))
    def see(self, gateway: int) -> None:
        self.gateways[gateway].see(self.ledger)

    @rule(seen=st.tuples(st.booleans(), st.booleans()), shipped=st.tuples(st.booleans(), st.booleans()))
    def raise_fence(self, seen: tuple[bool, bool], shipped: tuple[bool, bool]) -> None:
        """And take the next epoch at once, if every gateway has confirmed a fence of this epoch."""
        self.ledger.raise_fence()
        for each, sees, ships in zip(self.gateways, seen, shipped, strict=True):
            if sees:
                each.see(self.ledger)
            if ships:
                self.ship_of(each, len(each.records))
        if self.may_take():
            self.take(late=False)

    @precondition(lambda self: self.model.open())
    @rule(data=st.data(), part=st.sampled_from([0.5, 1.0]))
    def end_behind_a_fence(self, data: st.DataObject, part: float) -> None:
        """A request ends when its gateway has confirmed a fence and another one has not: the snapshot has it open, and the new
        counters learn of the end when it is shipped.
        """
        found = data.draw(st.sampled_from(self.model.open()))
        self.ledger.raise_fence()
        owner = self.owners[found.request.id]
        owner.see(self.ledger)
        self.ship_of(owner, len(owner.records))
        self.end_of(found, part)
        self.early.remove(found)
        self.settle_early_of(found)
        self.rebuild_fenced()
        self.ship_of(owner, len(owner.records))
        while self.pending_updates:
            self.tell_of(self.pending_updates.pop())
        counted = self.run(self.counters.settled(self.tenant.tenant_id))
        assert counted is None or counted.epoch != self.ledger.epoch or found.request.id not in counted.open

    @rule(gateway=st.integers(0, 1), tokens=st.sampled_from([20, 30, 60]))
    def admit_behind_a_fence(self, gateway: int, tokens: int) -> None:
        """A fence is seen while the journal is written, and confirmed by all. The next counters admit what they may."""
        self.ledger.raise_fence()
        self.ask(self.gateways[gateway], self.request(tokens), overtaken=True)
        if self.ledger.epoch <= self.ledger.fenced_epoch:
            self.rebuild_fenced()
            self.admit(gateway, tokens, times=8, overtaken=False)

    @rule(gateway=st.integers(0, 1), tokens=st.sampled_from([20, 30, 60]))
    def overtake_a_rebuild(self, gateway: int, tokens: int) -> None:
        """Another rebuild takes an epoch whose counters admit, and no gateway has seen the fence behind it."""
        self.rebuild()
        self.admit(gateway, tokens, times=1, overtaken=False)
        self.ledger.raise_fence()
        if self.may_take():
            self.take(late=False)
            self.admit(gateway, tokens, times=8, overtaken=False)

    @precondition(lambda self: self.may_take())
    @rule(
        late=st.sampled_from([False, False, False, True]),
        gateway=st.integers(0, 1),
        tokens=st.sampled_from([20, 30, 60]),
    )
    def take_and_admit(self, late: bool, gateway: int, tokens: int) -> None:
        self.take(late)
        self.admit(gateway, tokens, times=8, overtaken=False)

    def request(self, tokens: int) -> ReservationRequest:
        """Of the key and of the one below it in turn."""
        return (self.tenant, self.child)[len(self.owners) % 2].request(tokens)

    def take(self, late: bool) -> None:
        """Take the next epoch and a snapshot of what is open now."""
        self.ledger.epoch += 1
        self.taken.append((self.ledger.epoch, self.ledger.snapshot(self.tenant)))
        if not late:
            self.deliver(self.taken.pop())

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        self.deliver(self.draw(data, self.taken))

    @precondition(lambda self: self.pending_updates)
    @rule(data=st.data())
    def tell(self, data: st.DataObject) -> None:
        self.tell_of(self.draw(data, self.pending_updates))

    @rule()
    def rebuild(self) -> None:
        """As a gateway does, with all steps: the others see the fence and ship."""
        self.ledger.raise_fence()
        self.rebuild_fenced()

    @rule(how=st.sampled_from(["not", "not", "not", "forgotten", "all"]))
    def lose_the_counters(self, how: str) -> None:
        if how == "all":
            self.run(delete(self.client, self.tenant))
        if how == "forgotten":
            self.run(self.counters.invalidate(self.tenant.tenant_id))

    @rule(seconds=st.sampled_from([1, 10, 60]))
    def let_time_pass(self, seconds: int) -> None:
        self.run(age(self.client, self.tenant.tenant_id, seconds))
        self.passed_s += seconds

    @invariant()
    def limits_hold(self) -> None:
        """Tokens counted at the admission of their requests, and at their end."""
        now = self.now()
        for subject in self.tenant.subjects:
            requests, tokens = subject.limits.requests_per_minute, subject.limits.tokens_per_minute
            per_day = subject.limits.tokens_per_day
            if requests is not None:
                self.model.check_windows(subject, "requests_per_minute", requests, lambda each: each.at)
            if tokens is not None:
                self.model.check_windows(subject, "tokens_per_minute", tokens, lambda each: each.at)
                self.model.check_windows(
                    subject, "tokens_per_minute", tokens, lambda each: min(each.ended_at, now)
                )
            for day in {each.reserved.day for each in self.model.of(subject)} if per_day else ():
                assert sum(self.model.in_period(subject, "tokens_per_day", day)) <= (per_day or 0)

    def teardown(self) -> None:
        try:
            self.finish()
        finally:
            self.run(self.client.aclose())
            self.runner.close()

    def finish(self) -> None:
        """When all is done, the counters have each request once."""
        for request in self.refused:
            self.run(self.counters.cancel(self.tenant.tenant_id, request.id))
        for found in self.model.open():
            self.end_of(found, 1.0)
        for each in self.gateways:
            self.ship_of(each, len(each.records))
        while self.pending_updates:
            self.tell_of(self.pending_updates.pop())
        counted = self.run(self.counters.settled(self.tenant.tenant_id))
        if counted is None or counted.epoch != self.ledger.epoch:
            return
        for use in counted.uses:
            expected = self.model.in_period(self.tenant.subjects[0], "tokens_per_day", use.period)
            assert (use.tokens, 0) == expected
        assert not counted.open

    def ask(self, gateway: ModelJournal, request: ReservationRequest, overtaken: bool) -> bool:
        """As `Reserver` does: in the counters, in the journal, and then the fences are looked at; whether it is answered.

        With `overtaken`, a fence is seen while the journal is written: nothing that it waits for includes the request.
        """
        reply = self.run(self.counters.reserve(request))
        if isinstance(reply, CountersMissing):
            self.rebuild()
            reply = self.run(self.counters.reserve(request))
        if isinstance(reply, Denied | CountersMissing):
            return False
        assert isinstance(reply, Admitted)
        if reply.epoch <= gateway.fenced_epoch:
            self.refused.append(request)
            return False
        at = reply.at.timestamp() + self.passed_s
        admitted = ModelRequest(request, reserved_of(request, reply, reply.epoch), at, at + LEASE_S)
        self.owners[request.id] = gateway
        if overtaken:
            gateway.see(self.ledger)
        gateway.write(admitted)
        if self.is_withdrawn(gateway, reply.epoch):
            gateway.write(admitted, NOTHING_USED)
            return False
        self.model.requests[request.id] = admitted
        return True

    def is_withdrawn(self, gateway: ModelJournal, epoch: int) -> bool:
        return epoch <= gateway.fenced_epoch

    def settle_early_of(self, found: ModelRequest) -> None:
        assert found.used is not None
        settled = self.run(self.counters.settle_early(found.reserved, usage_of(*found.used)))
        if settled.found and found.request.id not in self.ledger.ended:
            self.owners[found.request.id].early[found.request.id] = settled.epoch

    def rebuild_fenced(self) -> None:
        """Every gateway confirms the fence, and ships no more than it must before that."""
        for each in self.gateways:
            if each.seen < self.ledger.fence:
                each.see(self.ledger)
            if not each.has_confirmed(self.ledger.fence):
                self.ship_of(each, each.to_ship - (each.written - len(each.records)))
        self.take(late=False)

    def end_of(self, found: ModelRequest, part: float) -> None:
        found.used, found.ended_at = (int(found.request.tokens * part), 0), self.now()
        self.owners[found.request.id].write(found, usage_of(*found.used))
        self.early.append(found)

    def ship_of(self, gateway: ModelJournal, records: int) -> None:
        """As `Shipping` does: of one request only the newest record of the batch."""
        batch, gateway.records = gateway.records[:records], gateway.records[records:]
        for request_id, (request, usage) in {each.request.id: (each, u) for each, u in batch}.items():
            if usage is None:
                if request_id not in self.ledger.ended:
                    # Not what it used: this snapshot of it stays open in the ledger.
                    self.ledger.open[request_id] = replace(request, used=None)
                continue
            self.ledger.open.pop(request_id, None)
            if usage.outcome is not None:
                self.ledger.ended[request_id] = request
            if not self.is_settled(gateway.early.pop(request_id, None)):
                self.pending_updates.append((request, usage, self.ledger.epoch))

    def is_settled(self, early: int | None) -> bool:
        """Whether the counters of this epoch know an end already."""
        return early == self.ledger.epoch

    def tell_of(self, update: tuple[ModelRequest, SettledUsage, int]) -> None:
        """As `SettlementQueue` does, after the end was shipped."""
        found, usage, written = update
        charge = None if usage.outcome is None else replace(found.reserved, epoch=written)
        settled = self.run(
            self.counters.settle(self.tenant.tenant_id, found.request.id, usage, charge=charge)
        )
        if settled.epoch < written and found.reserved.epoch != written:
            self.rebuild()

    def may_take(self) -> bool:
        """Whether one of the rebuilds that wait behind a fence of their own goes on."""
        if self.ledger.epoch == 0:
            return True
        fences = enumerate(self.ledger.fences, start=1)
        return any(self.is_behind(outdated) and self.is_confirmed(fence) for fence, outdated in fences)

    def is_behind(self, outdated: int) -> bool:
        """Whether a fence that outdates counters up to this epoch allows to take the next one."""
        return self.ledger.epoch <= outdated

    def is_confirmed(self, fence: int) -> bool:
        return all(each.has_confirmed(fence) for each in self.gateways)

    def deliver(self, taken: tuple[int, CounterSnapshot]) -> None:
        self.run(self.counters.rebuild(self.tenant.tenant_id, *taken))

    def draw(self, data: st.DataObject, among: list[Answer]) -> Answer:
        """Takes one out."""
        return among.pop(data.draw(st.integers(0, len(among) - 1)))

    def now(self) -> float:
        return time.time() + self.passed_s

    def run(self, step: Coroutine[Any, Any, Answer]) -> Answer:
        return self.runner.run(step)


async def connect(url: str) -> tuple[Redis, Counters]:
    client = open_valkey(url, command_s=10.0)
    assert isinstance(client, Redis)
    return client, Counters(client, command_s=10.0, bulk_s=10.0)


async def delete(client: Redis, tenant: LimitedTenant) -> None:
    keys = await keys_of(client, tenant.tenant_id)
    if keys:
        await client.delete(*keys)


@pytest.mark.parametrize("limited", [RATES, DAYS], ids=["rates", "days"])
def test_no_limit_is_exceeded_whatever_comes_between_the_steps(
    valkey_url: str, limited: tuple[QuotaLimits, ...]
) -> None:
    class OnValkey(EpochMachine):
        url = valkey_url
        limits = limited

    run_state_machine_as_test(OnValkey, settings=SETTINGS)


MUTATIONS: dict[str, tuple[type, str, Any]] = {
    "no fence": (EpochMachine, "may_take", lambda self: True),
    "behind the fence of another rebuild": (
        EpochMachine,
        "is_behind",
        lambda self, outdated: self.ledger.epoch <= self.ledger.fenced_epoch,
    ),
    "not confirmed": (ModelJournal, "has_confirmed", lambda self, fence: True),
    "confirmed before shipped": (
        ModelJournal,
        "has_confirmed",
        lambda self, fence: self.seen >= fence,
    ),
    "an early end under any epoch is done": (
        EpochMachine,
        "is_settled",
        lambda self, early: early is not None,
    ),
    "what a fence has overtaken is answered": (
        EpochMachine,
        "is_withdrawn",
        lambda self, gateway, epoch: False,
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_rule_that_is_missing_is_found(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch, mutation: str
) -> None:
    monkeypatch.setattr(*MUTATIONS[mutation])
    with pytest.raises(AssertionError):
        test_no_limit_is_exceeded_whatever_comes_between_the_steps(valkey_url, DAYS)
