"""The counters against a model, under random admissions, ends, heartbeats, reaping, losses, rebuilds and repetitions."""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import uuid4

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
from tests.tenants.counters.limited_tenant import age, keys_of, reserved_of, usage_of

from loraplex.tenants.counters.counter_replies import (
    Admitted,
    AlreadyEnded,
    CountersMissing,
    Decision,
    Denied,
    PolicyOutdated,
    Settled,
)
from loraplex.tenants.counters.counters import LEASE_S, Counters
from loraplex.tenants.counters.snapshot import CounterSnapshot
from loraplex.tenants.periods import periods_of
from loraplex.tenants.quotas.limits import COUNTED, Level, QuotaLimits, Subject
from loraplex.tenants.quotas.reservation import REFUSED, ReservationRequest, SettledUsage
from loraplex.tenants.valkey import open_valkey

Answer = TypeVar("Answer")
REMEMBERED_S = 600
AHEAD_S = 3600
# Steps that never end just before a lease or a remembered end does.
PAUSES = st.sampled_from([10, 30, 50])
SMALL = st.one_of(st.none(), st.integers(0, 60))
LIMITS = st.builds(
    QuotaLimits,
    requests_per_minute=st.one_of(st.none(), st.integers(1, 12)),
    tokens_per_minute=SMALL,
    concurrent_requests=st.one_of(st.none(), st.integers(0, 5)),
    tokens_per_day=SMALL,
    tokens_per_month=SMALL,
    budget_per_day=st.one_of(st.none(), st.integers(0, 20)),
    budget_per_month=st.one_of(st.none(), st.integers(0, 20)),
)
# Mostly wide: a tenant that may do nothing tests little.
WIDE = QuotaLimits(requests_per_minute=40, tokens_per_minute=60, concurrent_requests=9, tokens_per_day=900)
SETTINGS = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[*HealthCheck],
)
ANY_LIMITS = st.one_of(st.just(WIDE), st.just(QuotaLimits()), LIMITS)


@dataclass
class Stored:
    """What Valkey has: `epoch` None after a loss."""

    epoch: int | None = None
    policy: int = 0
    last_epoch: int = 0


class CounterMachine(RuleBasedStateMachine):
    url: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        client = open_valkey(self.url, command_s=10.0)
        assert isinstance(client, Redis)
        self.client = client
        self.counters = self.run(make_counters(client))
        self.tenant_id = uuid4()
        self.model = CounterModel()
        self.stored = Stored()
        self.passed_s = 0.0
        self.policy = 1
        self.subjects: dict[Level, list[Subject]] = {}
        self.grouped = False

    @initialize(
        tenant=ANY_LIMITS,
        keys=st.tuples(ANY_LIMITS, ANY_LIMITS, ANY_LIMITS),
        adapters=st.tuples(ANY_LIMITS, ANY_LIMITS),
        grouped=st.booleans(),
    )
    def have_limits(
        self,
        tenant: QuotaLimits,
        keys: tuple[QuotaLimits, ...],
        adapters: tuple[QuotaLimits, ...],
        grouped: bool,
    ) -> None:
        """`grouped`: the first key is the root of the others."""
        self.grouped = grouped
        self.subjects = {
            "tenant": [Subject("tenant", self.tenant_id, tenant)],
            "key": [Subject("key", uuid4(), limits) for limits in keys],
            "adapter": [Subject("adapter", uuid4(), limits) for limits in adapters],
        }

    @rule(
        key=st.integers(0, 2),
        adapter=st.sampled_from([0, 1, None]),
        tokens=st.integers(0, 40),
        amount=st.integers(0, 9000),
        sequences=st.integers(1, 4),
    )
    def admit(self, key: int, adapter: int | None, tokens: int, amount: int, sequences: int) -> None:
        root, own = self.subjects["key"][0], self.subjects["key"][key]
        group = [Subject("group", root.id, root.limits)] if self.grouped and own is not root else []
        subjects = [self.subjects["tenant"][0], *group, own]
        if adapter is not None:
            subjects.append(self.subjects["adapter"][adapter])
        request = ReservationRequest(
            id=uuid4(),
            tenant_id=self.tenant_id,
            request_id="r",
            policy_epoch=self.policy,
            api_key_id=own.id,
            adapter_id=None if adapter is None else subjects[-1].id,
            subjects=tuple(subjects),
            limit_root=root.id if group else None,
            prompt_tokens=tokens,
            completion_tokens=0,
            amount_nano=amount,
            sequences=sequences,
        )
        reply = self.run(self.counters.reserve(request))
        if self.stored.epoch is None:
            assert reply == CountersMissing()
            self.rebuild()
            reply = self.run(self.counters.reserve(request))
        assert isinstance(reply, Admitted | Denied)
        self.check_decisions(request, reply)
        if isinstance(reply, Admitted):
            assert reply.epoch == self.stored.epoch
            at = reply.at.timestamp() + self.passed_s
            reserved = reserved_of(request, reply, reply.epoch)
            self.model.admit(ModelRequest(request, reserved, at, at + LEASE_S))
            self.stored.policy = max(self.stored.policy, self.policy)

    @precondition(lambda self: self.open() and self.stored.epoch)
    @rule(data=st.data())
    def admit_again(self, data: st.DataObject) -> None:
        found = data.draw(st.sampled_from(self.open()))
        reply = self.run(self.counters.reserve(found.request))
        if found.request.policy_epoch < self.stored.policy:
            assert reply == PolicyOutdated(self.stored.policy)
            return
        assert isinstance(reply, Admitted)
        assert reply.repeated
        assert (reply.day, reply.month) == (found.reserved.day, found.reserved.month)

    @precondition(lambda self: self.open())
    @rule(data=st.data(), part=st.sampled_from([0.0, 0.3, 1.0]))
    def settle(self, data: st.DataObject, part: float) -> None:
        """`part` 0 is a request that was cancelled before it cost anything."""
        found = data.draw(st.sampled_from(self.open()))
        actual = actual_of(found, part)
        settled = self.run(self.counters.settle(self.tenant_id, found.request.id, actual))
        assert settled == Settled(self.stored.epoch is not None)
        self.model.settle(found, actual.tokens, actual.amount_nano, self.now())
        if self.stored.epoch is None:
            # The lost counters do not remember this end.
            found.ended_at = -REMEMBERED_S

    @precondition(lambda self: self.open() and self.stored.epoch)
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        found = data.draw(st.sampled_from(self.open()))
        settled = self.run(self.counters.settle(self.tenant_id, found.request.id, REFUSED))
        assert settled == Settled(True)
        self.model.give_back(found, self.now())

    @precondition(lambda self: self.lately_ended() and self.stored.epoch)
    @rule(data=st.data())
    def repeat_what_has_ended(self, data: st.DataObject) -> None:
        found = data.draw(st.sampled_from(self.lately_ended()))
        reservation_id = found.request.id
        assert self.run(self.counters.settle(self.tenant_id, reservation_id, usage_of(9, 9))) == Settled(
            False
        )
        assert self.run(self.counters.reap(self.tenant_id, reservation_id, usage_of(9, 9))) == Settled(False)
        assert self.run(self.counters.heartbeat(self.tenant_id, [found.reserved])).lost == {reservation_id}
        if found.request.policy_epoch >= self.stored.policy:
            assert self.run(self.counters.reserve(found.request)) == AlreadyEnded()

    @rule(every=st.integers(1, 3))
    def heartbeat(self, every: int) -> None:
        alive = [each for each in self.open() if each.end > self.now()][::every]
        reply = self.run(self.counters.heartbeat(self.tenant_id, [each.reserved for each in alive]))
        if self.stored.epoch is None:
            assert reply.epoch is None
            return
        assert reply.extended == {each.request.id for each in alive}
        for each in alive:
            each.end = self.now() + LEASE_S

    @rule(data=st.data())
    def reap(self, data: st.DataObject) -> None:
        expired = self.run(self.counters.expired(self.tenant_id))
        if self.stored.epoch is None:
            assert expired == []
            return
        assert set(expired) == {each.request.id for each in self.open() if each.end <= self.now()}
        for reservation_id in expired:
            found = self.model.requests[reservation_id]
            actual = actual_of(found, data.draw(st.sampled_from([0.0, 1.0])))
            assert self.run(self.counters.reap(self.tenant_id, reservation_id, actual)) == Settled(True)
            self.model.settle(found, actual.tokens, actual.amount_nano, self.now())
        alive = self.open()[:1]
        for each in alive:
            settled = self.run(self.counters.reap(self.tenant_id, each.request.id, usage_of(0)))
            assert settled == Settled(False)

    @rule(seconds=PAUSES)
    def let_time_pass(self, seconds: int) -> None:
        self.run(age(self.client, self.tenant_id, seconds))
        self.passed_s += seconds

    @rule()
    def change_the_policy(self) -> None:
        self.policy += 1
        assert self.run(self.counters.publish_policy(self.tenant_id, self.policy)) == self.policy
        assert self.run(self.counters.publish_policy(self.tenant_id, self.policy - 1)) == self.policy
        self.stored.policy = self.policy

    @rule(everything=st.booleans())
    def lose_the_counters(self, everything: bool) -> None:
        if everything:
            keys = self.run(keys_of(self.client, self.tenant_id))
            if keys:
                self.run(delete(self.client, keys))
            self.stored.policy = 0
        else:
            self.run(self.counters.invalidate(self.tenant_id))
        self.stored.epoch = None

    @precondition(lambda self: self.stored.epoch)
    @rule()
    def set_the_clock_right(self) -> None:
        """As after a failover from a server whose clock was ahead by more than all pauses together."""
        self.run(age(self.client, self.tenant_id, -AHEAD_S))
        self.stored.epoch = None

    @precondition(lambda self: self.stored.epoch)
    @rule()
    def rebuild_living_counters(self) -> None:
        """As after a settle with an unknown outcome: the counters live, and so do their buckets."""
        self.rebuild()

    @invariant()
    def limits_hold(self) -> None:
        subjects = self.all_subjects()
        self.model.check_limits(subjects, self.periods(), self.now())

    def teardown(self) -> None:
        """Everything ends: nothing is reserved or running, and the use is the sum of what ended."""
        if self.stored.epoch is None:
            self.rebuild()
        for found in self.open():
            self.run(self.counters.cancel(self.tenant_id, found.request.id))
            self.model.settle(found, 0, 0, self.now())
        uses = self.run(self.counters.read(self.tenant_id, self.all_subjects()))
        assert uses is not None
        by_id = {subject.id: subject for subject in self.all_subjects()}
        for use in uses:
            assert use.reserved == 0
            if not use.name.endswith("_per_minute"):
                period = self.periods()[use.name.endswith("_per_month")]
                expected = self.model.expected(by_id[use.subject_id], use.name, period, self.now())
                assert (use.used, 0) == expected
        left = self.run(keys_of(self.client, self.tenant_id))
        assert not [
            key for key in left if key.startswith(self.current("leases")) or key == self.current("open")
        ]
        self.run(self.client.aclose())
        self.runner.close()

    def rebuild(self) -> None:
        first, lost = self.stored.last_epoch == 0, self.stored.epoch is None
        self.stored.last_epoch += 1
        self.stored.epoch = self.stored.last_epoch
        self.stored.policy = max(self.stored.policy, self.policy)
        snapshot = CounterSnapshot(
            policy_epoch=self.policy,
            totals=self.model.totals(self.all_subjects()),
            reservations=tuple(each.reserved for each in self.open()),
            full_buckets=first,
        )
        assert (
            self.run(self.counters.rebuild(self.tenant_id, self.stored.epoch, snapshot)) == self.stored.epoch
        )
        # A snapshot that arrives twice changes nothing.
        assert (
            self.run(self.counters.rebuild(self.tenant_id, self.stored.epoch, snapshot)) == self.stored.epoch
        )
        if lost and not first:
            self.model.lose(self.all_subjects(), self.now())
        for each in self.model.requests.values():
            each.is_restored = True
            if each.used is None:
                each.end = self.now() + LEASE_S
            else:
                each.ended_at = -REMEMBERED_S

    def check_decisions(self, request: ReservationRequest, reply: Admitted | Denied) -> None:
        limited = [
            (subject, name)
            for subject in request.subjects
            for name in COUNTED
            if subject.limits.get(name) is not None
        ]
        found = {(each.level, each.name): each for each in reply.decisions}
        assert found.keys() == {(subject.level, name) for subject, name in limited}
        assert isinstance(reply, Admitted) == all(each.passed for each in reply.decisions)
        alive = sum(each.end <= self.now() for each in self.open())
        assert reply.overdue == alive
        for subject, name in limited:
            self.check_decision(found[subject.level, name], subject, request)

    def check_decision(self, decision: Decision, subject: Subject, request: ReservationRequest) -> None:
        period = self.periods()[decision.name.endswith("_per_month")]
        used, reserved = self.model.expected(subject, decision.name, period, self.now())
        assert decision.limit == subject.limits.get(decision.name)
        assert decision.reserved == reserved
        if decision.name.endswith("_per_minute"):
            assert decision.used >= used - 1
            assert self.model.after_loss or decision.used <= used + 1
        else:
            assert decision.used == used
        if not decision.name.startswith("budget"):
            requested = request.tokens if "tokens" in decision.name else 1
            if decision.name == "concurrent_requests":
                requested = request.sequences
            assert decision.asked == requested
            assert decision.passed == (requested <= decision.limit - decision.used - decision.reserved)
        assert (decision.retry_after_s is None) == (decision.asked > decision.limit)

    def open(self) -> list[ModelRequest]:
        return self.model.open()

    def lately_ended(self) -> list[ModelRequest]:
        since = self.now() - REMEMBERED_S
        return [
            each for each in self.model.requests.values() if each.used is not None and each.ended_at > since
        ]

    def all_subjects(self) -> list[Subject]:
        return [subject for subjects in self.subjects.values() for subject in subjects]

    def now(self) -> float:
        return time.time() + self.passed_s

    def periods(self) -> tuple[str, str]:
        """Stored times are moved, not periods."""
        periods = periods_of(datetime.now(UTC))
        return periods.day, periods.month

    def current(self, kind: str) -> str:
        return f"loraplex:{{{self.tenant_id}}}:{self.stored.epoch}:{kind}"

    def run(self, step: Coroutine[Any, Any, Answer]) -> Answer:
        return self.runner.run(step)


async def make_counters(client: Redis) -> Counters:
    return Counters(client, command_s=10.0, bulk_s=10.0)


async def delete(client: Redis, keys: list[str]) -> None:
    await client.delete(*keys)


def actual_of(found: ModelRequest, part: float) -> SettledUsage:
    return usage_of(int(found.request.tokens * part), int(found.request.amount_nano * part))


def test_no_limit_is_ever_exceeded(valkey_url: str) -> None:
    class OnValkey(CounterMachine):
        url = valkey_url

    run_state_machine_as_test(OnValkey, settings=SETTINGS)
