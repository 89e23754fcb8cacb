"""Refusals that are repeated without asking the counters: for whom, for how long, and within bounds."""

from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest

from loraplex.tenants.admission import recent_refusals
from loraplex.tenants.admission.recent_refusals import MAX_SECONDS, RecentRefusals
from loraplex.tenants.counters.counter_replies import Decision, Denied
from loraplex.tenants.errors import QuotaExhausted, RateLimited
from loraplex.tenants.quotas.limits import Level, LimitName, Subject
from loraplex.tenants.quotas.reservation import ReservationRequest

TENANT, KEY, OTHER_KEY, ADAPTER = (uuid4() for _ in range(4))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def asked(policy_epoch: int = 1, tenant: UUID = TENANT) -> ReservationRequest:
    subjects = (Subject("tenant", tenant), Subject("key", KEY), Subject("adapter", ADAPTER))
    return ReservationRequest(
        id=uuid4(),
        tenant_id=tenant,
        request_id="r",
        policy_epoch=policy_epoch,
        api_key_id=KEY,
        adapter_id=ADAPTER,
        subjects=subjects,
        prompt_tokens=5,
        completion_tokens=0,
    )


def failed(level: Level, name: LimitName = "requests_per_minute", wait: float | None = 2.0) -> Decision:
    limit = 0 if wait is None else 30
    return Decision(
        level=level, name=name, limit=limit, used=limit, reserved=0, asked=1, passed=False, retry_after_s=wait
    )


def denied(*decisions: Decision) -> Denied:
    return Denied(at=datetime.now(UTC), decisions=decisions, overdue=0)


def test_a_refusal_holds_until_the_bucket_can_have_a_request() -> None:
    clock = Clock()
    refusals = RecentRefusals(clock)
    refusals.remember(asked(), denied(failed("tenant", wait=0.8)), 0.0)
    clock.now = 0.5
    found = refusals.find(TENANT, OTHER_KEY, 1)
    assert found is not None
    error = found.error(clock.now)
    assert isinstance(error, RateLimited) and error.retry_after_s == pytest.approx(0.3)
    assert error.rate is not None and error.rate.requests is not None
    assert error.rate.requests.reset_s == pytest.approx(59.5)
    clock.now = 0.8
    assert refusals.find(TENANT, OTHER_KEY, 1) is None and len(refusals) == 0


def test_a_keys_refusal_is_its_own_and_an_adapters_is_forgotten() -> None:
    refusals = RecentRefusals(Clock())
    refusals.remember(asked(), denied(failed("key"), failed("adapter")), 0.0)
    assert refusals.find(TENANT, OTHER_KEY, 1) is None
    found = refusals.find(TENANT, KEY, 1)
    assert found is not None and found.error(0.0).level == "key" and len(refusals) == 1


def test_another_key_learns_only_what_its_tenant_lacks() -> None:
    refusals = RecentRefusals(Clock())
    spent = failed("key", "tokens_per_minute", 30.0)
    refusals.remember(asked(), denied(failed("tenant"), spent), 0.0)
    found = refusals.find(TENANT, OTHER_KEY, 1)
    assert found is not None
    error = found.error(0.0)
    assert (error.level, error.limit, error.retry_after_s) == ("tenant", "requests_per_minute", 2.0)
    assert error.rate is not None and error.rate.tokens is None


def test_a_root_and_its_group_are_refused_by_their_own_names() -> None:
    refusals, root = RecentRefusals(Clock()), uuid4()
    of_root = replace(asked(), api_key_id=root, subjects=(Subject("tenant", TENANT), Subject("key", root)))
    subjects = (Subject("tenant", TENANT), Subject("group", root), Subject("key", KEY))
    of_child = replace(asked(), limit_root=root, subjects=subjects)
    refusals.remember(of_child, denied(failed("group")), 0.0)
    assert refusals.find(TENANT, root, 1) is None
    refusals.remember(of_root, denied(failed("key")), 0.0)
    levels = {key: found.error(0.0).level for key in (root, KEY) if (found := refusals.find(TENANT, key, 1))}
    assert levels == {root: "key", KEY: "group"}
    for given_back in (of_root, of_child):
        refusals.forget(given_back)
        assert len(refusals) == 0
        refusals.remember(of_child, denied(failed("group")), 0.0)
        refusals.remember(of_root, denied(failed("key")), 0.0)


def test_other_limits_are_asked_again() -> None:
    refusals = RecentRefusals(Clock())
    refusals.remember(asked(), denied(failed("tenant", "tokens_per_minute")), 0.0)
    assert refusals.find(TENANT, KEY, 1) is None


def test_another_policy_is_asked_again() -> None:
    refusals = RecentRefusals(Clock())
    refusals.remember(asked(policy_epoch=2), denied(failed("tenant")), 0.0)
    assert refusals.find(TENANT, KEY, 1) is None and refusals.find(TENANT, KEY, 2) is not None
    assert refusals.find(TENANT, KEY, 3) is None and len(refusals) == 0


def test_a_request_that_is_given_back_ends_the_refusals_of_its_tenant_and_key() -> None:
    refusals = RecentRefusals(Clock())
    refusals.remember(asked(), denied(failed("tenant"), failed("key")), 0.0)
    refusals.forget(asked())
    assert refusals.find(TENANT, KEY, 1) is None and len(refusals) == 0


def test_any_is_asked_again_within_a_second() -> None:
    clock = Clock()
    refusals = RecentRefusals(clock)
    refusals.remember(asked(), denied(failed("tenant", wait=None)), 0.0)
    clock.now = MAX_SECONDS - 0.1
    found = refusals.find(TENANT, KEY, 1)
    assert found is not None and isinstance(found.error(clock.now), QuotaExhausted)
    clock.now = MAX_SECONDS
    assert refusals.find(TENANT, KEY, 1) is None


def test_they_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_refusals, "MAX_SUBJECTS", 3)
    refusals = RecentRefusals(Clock())
    for number in range(5):
        refusals.remember(asked(tenant=UUID(int=number)), denied(failed("tenant")), 0.0)
    assert len(refusals) == 3
    assert refusals.find(UUID(int=1), OTHER_KEY, 1) is None
    assert refusals.find(UUID(int=2), OTHER_KEY, 1) is not None
