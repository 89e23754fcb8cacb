"""Limits with their use and author; the nearest; what is known while the counters do not answer."""

from collections.abc import Sequence
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest
from tests.platform.fake_admissions import FakeAdmissions
from tests.platform.web.observed_tenant import observed_tenant, set_limits

from loraplex.platform.web.console.limit_units import unit_of
from loraplex.platform.web.limits import queries as limits
from loraplex.tenants.actors import Actor
from loraplex.tenants.counters.counter_replies import Decision, Explanation, LimitUse, UnknownLimit
from loraplex.tenants.database import Database
from loraplex.tenants.errors import KeyNotFound, RefusalNotFound, ValkeyUnavailable
from loraplex.tenants.quotas import use_cases as quotas
from loraplex.tenants.quotas.limits import COUNTED, QuotaLimits, Subject
from loraplex.tenants.unit_of_work import unit_of_work

AT = datetime(2026, 12, 1, tzinfo=UTC)


class CountingAdmissions(FakeAdmissions):
    """Half of each limit is used, and a tenth reserved; of limits of adapters, all."""

    async def quotas(self, tenant_id: UUID, subjects: Sequence[Subject]) -> list[LimitUse]:
        return [
            LimitUse(
                level=subject.level,
                subject_id=subject.id,
                name="tokens_per_day",
                limit=limit,
                used=limit if subject.level == "adapter" else limit // 2,
                reserved=0 if subject.level == "adapter" else limit // 10,
                resets_at=AT,
            )
            for subject in subjects
            if (limit := subject.limits.tokens_per_day) is not None
        ]


class SilentAdmissions(FakeAdmissions):
    """Its counters do not answer."""

    async def quotas(self, tenant_id: UUID, subjects: Sequence[Subject]) -> list[LimitUse]:
        raise ValkeyUnavailable("away")


async def test_limits_of_all_levels_with_their_use_and_author(database: Database) -> None:
    seen = observed_tenant(database.url, tokens_per_day=1000, requests_per_minute=60, max_keys=4)
    set_limits(database.url, seen.id, api_key_id=seen.tenant.keys[seen.key_id], tokens_per_day=500)
    actor = Actor("key", "author")
    async with unit_of_work(database, actor, seen.id, None) as uow:
        await quotas.narrow_adapter(uow, seen.id, "coral", QuotaLimits(tokens_per_day=100))
    async with database.as_tenant(seen.id) as session:
        found = await limits.stored(session, seen.id)
    assert [(each.level, each.name, each.set_by) for each in found.subjects] == [
        ("tenant", seen.tenant.name, None),
        ("key", "k", None),
        ("adapter", "coral", "author"),
    ]
    assert all(each.used is None for each in found.subjects[0].limits if not each.name.startswith("max_"))
    counted = await limits.with_use(CountingAdmissions(), seen.id, found)
    assert counted is not None
    tenant, key, adapter = counted
    by_name = {each.name: each for each in tenant.limits}
    day = by_name["tokens_per_day"]
    assert (day.limit, day.used, day.reserved, day.taken, day.resets_at) == (1000, 500, 100, 600, AT)
    assert by_name["requests_per_minute"].used is None and by_name["max_keys"].used == 2
    assert [each.unit for each in (day, by_name["max_keys"])] == ["tokens", "things"]
    nearest = limits.nearest([tenant, key, adapter])
    assert [(each.level, each.name) for each in nearest] == [
        ("adapter", "tokens_per_day"),
        ("tenant", "tokens_per_day"),
        ("key", "tokens_per_day"),
        ("tenant", "max_keys"),
    ]
    shown = [day.model_copy(update={"limit": limit, "used": 10}) for limit in (0, 1000, 1001)]
    low = tenant.model_copy(
        update={"limits": tuple(each.model_copy(update={"reserved": 0}) for each in shown)}
    )
    assert [each.limit for each in limits.nearest([low])] == [0, 1000], "what is below 1 % is not near"


async def test_without_counters_limits_are_known_and_their_use_is_not(database: Database) -> None:
    seen = observed_tenant(database.url, tokens_per_day=1000)
    async with database.as_tenant(seen.id) as session:
        found = await limits.stored(session, seen.id)
    assert await limits.with_use(SilentAdmissions(), seen.id, found) is None
    assert found.subjects[0].limits[0].limit == 1000


async def test_the_limits_of_one_key_beside_those_of_the_tenant(database: Database) -> None:
    seen, other = observed_tenant(database.url, tokens_per_day=1000), observed_tenant(database.url)
    async with database.as_tenant(seen.id) as session:
        found = await limits.named(session, seen.id, "key", seen.key_id)
        bounds = await limits.bounds(session, seen.id)
        with pytest.raises(KeyNotFound):
            await limits.named(session, seen.id, "key", other.key_id)
        assert (await limits.named(session, seen.id, "adapter", "coral")).name == "coral"
    assert (found.name, found.state.revision, bounds["tokens_per_day"]) == ("k", 1, 1000)
    own = limits.by_name(found.state.limits)
    assert set(own.values()) == {None} and set(own) == set(COUNTED)


async def test_why_a_request_was_refused() -> None:
    passed = Decision(
        level="key",
        name="requests_per_minute",
        limit=9,
        used=1,
        reserved=0,
        asked=1,
        passed=True,
        retry_after_s=0.0,
    )
    unknown = UnknownLimit(level="tenant", name="budget_per_day", limit=7, asked=2)
    admissions, tenant_id = FakeAdmissions(), uuid4()
    admissions.explanations[tenant_id, "r"] = Explanation(
        request_id="r", at=AT, decisions=(passed,), unknown=(unknown,), degraded=True
    )
    found = await limits.explain(admissions, tenant_id, "r")
    assert (found.request_id, found.at, found.mode) == ("r", AT, "degraded")
    assert [
        (each.name, each.passed, each.used is not None, unit_of(each.name)) for each in found.decisions
    ] == [
        ("requests_per_minute", True, True, "requests"),
        ("budget_per_day", False, False, "money"),
    ]
    with pytest.raises(RefusalNotFound):
        await limits.explain(admissions, uuid4(), "r")
