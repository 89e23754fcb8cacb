"""The rates under random rebuilds: snapshots taken early, delivered late or never, while requests are admitted, end, and
update the counters. The ledger is a model, the counters are real. All requests stay within every window of every rate.
"""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

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
from loraplex.tenants.quotas.reservation import ReservationRequest
from loraplex.tenants.valkey import open_valkey

Answer = TypeVar("Answer")
# Tight, so that whatever is missed shows.
RATES = st.sampled_from(
    [QuotaLimits(tokens_per_minute=60), QuotaLimits(requests_per_minute=6, tokens_per_minute=80)]
)
SETTINGS = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[*HealthCheck],
)


class EpochMachine(RuleBasedStateMachine):
    """`epoch`: the ledger's. `taken`: snapshots not delivered yet. `pending_updates`: ends that the counters do not know, each
    with the ledger's epoch when it was written. `refused`: admitted by the counters but not stored in the ledger.
    """

    url: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.client, self.counters = self.run(connect(self.url))
        self.tenant = LimitedTenant()
        self.model = CounterModel()
        self.epoch = 0
        self.taken: list[tuple[int, CounterSnapshot]] = []
        self.pending_updates: list[tuple[ModelRequest, int]] = []
        self.refused: list[ReservationRequest] = []
        self.passed_s = 0.0

    @initialize(tenant=RATES, key=st.one_of(st.just(NO_LIMITS), RATES))
    def have_limits(self, tenant: QuotaLimits, key: QuotaLimits) -> None:
        self.tenant = LimitedTenant(tenant, key)

    @rule(tokens=st.sampled_from([20, 30, 60]))
    def admit(self, tokens: int) -> None:
        self.ask(self.tenant.request(tokens))

    @precondition(lambda self: self.refused)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        self.ask(self.draw(data, self.refused))

    @precondition(lambda self: self.refused)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.run(self.counters.cancel(self.tenant.tenant_id, self.draw(data, self.refused).id))

    @precondition(lambda self: self.model.open())
    @rule(data=st.data(), part=st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.0]))
    def end(self, data: st.DataObject, part: float) -> None:
        """Write the end to the ledger."""
        found = data.draw(st.sampled_from(self.model.open()))
        found.used, found.ended_at = (int(found.request.tokens * part), 0), self.now()
        self.pending_updates.append((found, self.epoch))

    @precondition(lambda self: self.pending_updates)
    @rule(data=st.data())
    def tell(self, data: st.DataObject) -> None:
        """And then the counters, as `SettlementQueue` does."""
        found, booked = self.draw(data, self.pending_updates)
        assert found.used is not None
        charge = replace(found.reserved, epoch=booked)
        settled = self.run(
            self.counters.settle(
                self.tenant.tenant_id, found.request.id, usage_of(*found.used), charge=charge
            )
        )
        if settled.epoch < booked and found.reserved.epoch != booked:
            self.rebuild(late=False)

    def take(self) -> None:
        """Take the next epoch and a snapshot of what is open now."""
        self.epoch += 1
        reservations = tuple(each.reserved for each in self.model.open())
        snapshot = CounterSnapshot(
            policy_epoch=POLICY, totals=(), reservations=reservations, full_buckets=self.epoch == 1
        )
        self.taken.append((self.epoch, snapshot))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        self.deliver(self.draw(data, self.taken))

    @rule(late=st.sampled_from([False, False, False, True]))
    def rebuild(self, late: bool) -> None:
        self.take()
        if not late:
            self.deliver(self.taken.pop())

    @rule(how=st.sampled_from(["not", "not", "not", "not", "forgotten", "all"]))
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
    def rates_hold(self) -> None:
        """Tokens counted at the admission of their requests, and at their end."""
        now = self.now()
        for subject in self.tenant.subjects:
            requests, tokens = subject.limits.requests_per_minute, subject.limits.tokens_per_minute
            if requests is not None:
                self.model.check_windows(subject, "requests_per_minute", requests, lambda each: each.at)
            if tokens is not None:
                self.model.check_windows(subject, "tokens_per_minute", tokens, lambda each: each.at)
                self.model.check_windows(
                    subject, "tokens_per_minute", tokens, lambda each: min(each.ended_at, now)
                )

    def teardown(self) -> None:
        self.run(self.client.aclose())
        self.runner.close()

    def ask(self, request: ReservationRequest) -> None:
        reply = self.run(self.counters.reserve(request))
        if isinstance(reply, CountersMissing):
            self.rebuild(late=False)
            reply = self.run(self.counters.reserve(request))
        if isinstance(reply, Denied | CountersMissing):
            return
        assert isinstance(reply, Admitted)
        if reply.epoch != self.epoch:
            self.refused.append(request)
            return
        at = reply.at.timestamp() + self.passed_s
        self.model.requests[request.id] = ModelRequest(
            request, reserved_of(request, reply, reply.epoch), at, at + LEASE_S
        )

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


def test_no_rate_is_exceeded_whatever_comes_between_the_steps(valkey_url: str) -> None:
    class OnValkey(EpochMachine):
        url = valkey_url

    run_state_machine_as_test(OnValkey, settings=SETTINGS)
