"""The tokens of a session: one counter for each that a limit counts, which outlives rebuilds and ends a week after its last use."""

import asyncio
from dataclasses import replace
from typing import Final
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from tests.tenants.counters.limited_tenant import (
    EMPTY,
    POLICY,
    LimitedTenant,
    admit,
    deny,
    failed,
    keys_of,
    reserved_of,
    usage_of,
    used,
    with_counters,
)

from loraplex.tenants.counters.counter_replies import Admitted
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.counters.snapshot import CounterSnapshot
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.quotas.reservation import REFUSED, Reservation
from loraplex.tenants.valkey import tenant_key

WEEK: Final = 7 * 86_400
KEPT: Final = 10_000
"""Sessions of a tenant that are remembered."""
TWENTY: Final = QuotaLimits(tokens_per_session=20)


def snapshot(*reservations: Reservation) -> CounterSnapshot:
    return CounterSnapshot(policy_epoch=POLICY, totals=(), reservations=reservations)


async def in_session(counters: Counters, tenant: LimitedTenant, level: str = "tenant") -> tuple[int, int]:
    use = (await used(counters, tenant, "s"))[level, "tokens_per_session"]
    return use.used, use.reserved


async def test_a_request_without_a_session_is_not_limited_and_writes_nothing_of_sessions(
    counters: Counters, client: Redis
) -> None:
    tenant = await with_counters(counters, LimitedTenant(tenant=TWENTY, key=TWENTY))
    for _ in range(3):
        reply = await admit(counters, tenant.request(100))
        assert reply.decisions == ()
    assert not [key for key in await keys_of(client, tenant.tenant_id) if "session" in key]
    assert ("tenant", "tokens_per_session") not in await used(counters, tenant)


async def test_a_session_that_is_used_up_is_over_and_others_go_on(counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant(tenant=TWENTY))
    first, second = tenant.request(session="s"), tenant.request(session="s")
    await admit(counters, first)
    await admit(counters, second)
    open_ones = (await deny(counters, tenant.request(1, session="s"))).deciding
    assert (open_ones.exhausted, open_ones.retry_after_s) == (False, 1.0)
    await counters.settle(tenant.tenant_id, first.id, usage_of(4))
    await counters.settle(tenant.tenant_id, second.id, usage_of(10))
    assert await in_session(counters, tenant) == (14, 0)
    denied = (await deny(counters, tenant.request(7, session="s"))).deciding
    assert (denied.name, denied.used, denied.asked) == ("tokens_per_session", 14, 7)
    assert (denied.exhausted, denied.retry_after_s) == (True, None)
    await admit(counters, tenant.request(6, session="s"))
    await admit(counters, tenant.request(20, session="other"))


async def test_keys_share_the_sessions_of_their_tenant_and_group_and_have_their_own(
    counters: Counters,
) -> None:
    tenant = await with_counters(
        counters, LimitedTenant(tenant=QuotaLimits(tokens_per_session=35), key=TWENTY)
    )
    child = tenant.child()
    await admit(counters, tenant.request(15, session="s"))
    assert failed(await counters.reserve(child.request(6, session="s"))) == [("group", "tokens_per_session")]
    await admit(counters, child.request(5, session="s"))
    stranger = LimitedTenant(tenant=tenant.tenant, tenant_id=tenant.tenant_id)
    assert failed(await counters.reserve(stranger.request(16, session="s"))) == [
        ("tenant", "tokens_per_session")
    ]
    await admit(counters, stranger.request(15, session="s"))
    assert await in_session(counters, stranger, "key") == (0, 15)


async def test_a_session_goes_on_in_the_next_counters(counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant(tenant=TWENTY))
    ended, running, lost = (tenant.request(5, session="s") for _ in range(3))
    replies = [await admit(counters, each) for each in (ended, running, lost)]
    await counters.settle(tenant.tenant_id, ended.id, usage_of(3))
    stored = reserved_of(tenant.request(5, id=running.id), replies[1])
    assert await counters.rebuild(tenant.tenant_id, 2, snapshot(stored)) == 2
    assert await in_session(counters, tenant) == (3 + 5, 5), "what the snapshot lacks pays its bound"
    await counters.settle(tenant.tenant_id, running.id, usage_of(2))
    assert await in_session(counters, tenant) == (10, 0)
    assert await counters.invalidate(tenant.tenant_id)
    assert await counters.rebuild(tenant.tenant_id, 3, snapshot()) == 3
    assert await in_session(counters, tenant) == (10, 0)


async def test_what_ended_in_the_old_counters_is_counted_once(counters: Counters) -> None:
    tenant = await with_counters(counters, LimitedTenant(tenant=TWENTY))
    request = tenant.request(session="s")
    reply = await admit(counters, request)
    reserved = reserved_of(request, reply)
    await counters.settle_early(reserved, usage_of(4))
    stored = reserved_of(tenant.request(id=request.id), reply)
    assert await counters.rebuild(tenant.tenant_id, 2, snapshot(stored)) == 2
    await counters.settle(tenant.tenant_id, request.id, usage_of(4), charge=reserved)
    assert await in_session(counters, tenant) == (4, 0)


async def test_lost_counters_forget_sessions_and_a_heartbeat_brings_what_runs_back(
    counters: Counters, client: Redis
) -> None:
    tenant = await with_counters(counters, LimitedTenant(tenant=TWENTY))
    request = tenant.request(session="s")
    reserved = reserved_of(request, await admit(counters, request), epoch=1)
    await client.delete(*await keys_of(client, tenant.tenant_id))
    assert await counters.rebuild(tenant.tenant_id, 1, EMPTY) == 1
    assert await in_session(counters, tenant) == (0, 0)
    await counters.heartbeat(tenant.tenant_id, [reserved])
    assert await in_session(counters, tenant) == (0, 10)
    late = reserved_of(tenant.request(session="s"), await admit(counters, request))
    await counters.settle(tenant.tenant_id, late.id, usage_of(6), charge=late)
    await counters.settle(tenant.tenant_id, request.id, usage_of(3))
    assert await in_session(counters, tenant) == (9, 0)


async def test_a_session_is_forgotten_a_week_after_its_last_request(
    counters: Counters, client: Redis
) -> None:
    tenant = await with_counters(counters, LimitedTenant(tenant=TWENTY))
    request, key = tenant.request(session="s"), tenant_key(tenant.tenant_id, "session:s")
    await admit(counters, request)
    assert WEEK - 10 < await client.ttl(key) <= WEEK
    await client.expire(key, 60)
    await counters.settle(tenant.tenant_id, request.id, usage_of(3))
    assert WEEK - 10 < await client.ttl(key) <= WEEK


async def kept_sessions(client: Redis, tenant: LimitedTenant) -> set[str]:
    """The sessions that Valkey has; its index has the same."""
    prefix = tenant_key(tenant.tenant_id, "")
    names = [key.removeprefix(prefix).split(":") for key in await keys_of(client, tenant.tenant_id)]
    index = await client.zrange(f"{prefix}sessions", 0, -1)
    kept = {name[1] for name in names if name[0] == "session"}
    assert kept == {label.decode() for label in index if isinstance(label, bytes)}
    return kept


async def test_what_used_nothing_leaves_nothing(counters: Counters, client: Redis) -> None:
    tenant = await with_counters(counters, LimitedTenant(tenant=TWENTY))
    refused, cancelled, unused, empty = requests = [
        tenant.request(size, session=f"s{size}") for size in (3, 2, 1, 0)
    ]
    for request in requests:
        await admit(counters, request)
    assert await kept_sessions(client, tenant) == {"s0", "s1", "s2", "s3"}
    await deny(counters, tenant.request(21, session="denied"))
    await counters.settle(tenant.tenant_id, refused.id, REFUSED)
    await counters.cancel(tenant.tenant_id, cancelled.id)
    for request in (unused, empty):
        await counters.settle(tenant.tenant_id, request.id, usage_of(0))
    assert not [key for key in await keys_of(client, tenant.tenant_id) if "session" in key]


async def test_of_too_many_sessions_the_one_that_is_idle_longest_begins_anew(
    counters: Counters, client: Redis
) -> None:
    """One that is older and runs, and one that was used again since, go on."""
    tenant = await with_counters(counters, LimitedTenant(tenant=TWENTY))
    await admit(counters, tenant.request(5, session="runs"))

    async def use(session: str) -> None:
        request = tenant.request(5, session=session)
        await admit(counters, request)
        await counters.settle(tenant.tenant_id, request.id, usage_of(4))

    await use("rests")
    await use("again")
    fresh = [f"fresh-{number}" for number in range(KEPT + 1)]
    for first in range(0, KEPT - 3, 500):
        await asyncio.gather(*map(use, fresh[first : min(first + 500, KEPT - 3)]))
    await use("again")
    everyone = {"runs", "again", "rests", *fresh[: KEPT - 3]}
    assert await kept_sessions(client, tenant) == everyone
    await use(fresh[KEPT - 3])
    assert await kept_sessions(client, tenant) == everyone - {"rests"} | {fresh[KEPT - 3]}
    for session in fresh[KEPT - 2 :]:
        await use(session)
    kept = await kept_sessions(client, tenant)
    assert len(kept) == KEPT and {"runs", "again", *fresh[KEPT - 3 :]} <= kept
    assert await in_session(counters, tenant) == (0, 0)
    await admit(counters, tenant.request(20, session="rests"))
    assert (await deny(counters, tenant.request(13, session="again"))).deciding.used == 8
    assert (await deny(counters, tenant.request(16, session="runs"))).deciding.reserved == 5


@pytest.mark.parametrize("session", ["", "a b", "x" * 129, "line\n"])
def test_labels_are_harmless(session: str) -> None:
    with pytest.raises(InvalidField, match="session"):
        LimitedTenant().request(session=session)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "settle", "refuse", "rebuild", "heartbeat"]),
        st.sampled_from(["s", "t", None]),
        st.integers(0, 9),
    ),
    max_size=25,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(STEPS)
async def test_settled_and_open_use_is_exact_whatever_comes_between(
    counters: Counters, client: Redis, steps: list[tuple[str, str | None, int]]
) -> None:
    tenant, epoch = await with_counters(counters, LimitedTenant(tenant=TWENTY)), 1
    used_of, running = {"s": 0, "t": 0, None: 0}, dict[UUID, Reservation]()
    for step, session, size in steps:
        if step == "admit":
            taken = used_of[session] + sum(
                each.request.tokens for each in running.values() if each.request.session == session
            )
            request = tenant.request(size, session=session)
            reply = await counters.reserve(request)
            assert isinstance(reply, Admitted) == (session is None or taken + size <= 20)
            if isinstance(reply, Admitted):
                running[request.id] = reserved_of(request, reply)
        elif step == "rebuild":
            stored = [
                replace(each, request=replace(each.request, session=None, counts_session=False))
                for each in running.values()
            ]
            epoch += 1
            assert await counters.rebuild(tenant.tenant_id, epoch, snapshot(*stored)) == epoch
        elif step == "heartbeat":
            await counters.heartbeat(tenant.tenant_id, [*running.values()])
        elif running:
            reserved = running.pop(next(iter(running)))
            tokens = min(size, reserved.request.tokens) if step == "settle" else 0
            usage = usage_of(tokens) if step == "settle" else REFUSED
            await counters.settle(tenant.tenant_id, reserved.id, usage, charge=reserved)
            used_of[reserved.request.session] += tokens
    kept = await kept_sessions(client, tenant)
    for session in ("s", "t"):
        use = (await used(counters, tenant, session))["tenant", "tokens_per_session"]
        held = [each.request.tokens for each in running.values() if each.request.session == session]
        assert (use.used, use.reserved) == (used_of[session], sum(held))
        assert bool(used_of[session] or sum(held)) <= (session in kept) <= bool(used_of[session] or held)
