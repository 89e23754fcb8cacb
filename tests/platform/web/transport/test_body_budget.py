"""The memory of bodies is shared: a tenant alone gets a quarter, and whatever large tenants do, the next one is served."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.platform.errors import GatewayError, Overloaded, ShareExceeded, describe
from loraplex.platform.web.transport.body_budget import FREE_PER_SHARE, BodyBudget

TOTAL = 1 << 20
CHUNK = 1 << 10


def tenant(number: int) -> UUID:
    return UUID(int=number)


def fill(budget: BodyBudget, owner: UUID) -> int:
    """Take all that the tenant gets, in chunks. Returns the number of bytes."""
    taken = 0
    try:
        while True:
            budget.take(owner, CHUNK)
            taken += CHUNK
    except (ShareExceeded, Overloaded):
        return taken


def test_a_tenant_alone_gets_a_quarter_and_429_beyond() -> None:
    budget = BodyBudget(TOTAL)
    assert fill(budget, tenant(1)) == TOTAL // 4
    with pytest.raises(ShareExceeded) as refused:
        budget.take(tenant(1), CHUNK)
    row = describe(refused.value).row
    assert (row.status, row.code, row.retry_after_s) == (429, "rate_limit_exceeded", 1)


def test_beside_large_tenants_the_next_one_gets_a_quarter_of_what_is_free() -> None:
    budget, free = BodyBudget(TOTAL), TOTAL
    for number in range(8):
        taken = fill(budget, tenant(number))
        assert free / 4 - CHUNK <= taken <= free / 4
        free -= taken


def test_a_small_tenant_that_finds_no_memory_is_not_blamed() -> None:
    budget = BodyBudget(TOTAL)
    for number in range(40):
        fill(budget, tenant(number))
    with pytest.raises(Overloaded) as refused:
        budget.take(tenant(99), CHUNK)
    assert describe(refused.value).row.status == 503


def test_shares_become_even_as_bodies_end() -> None:
    """Whatever the first took, tenants that replace their bodies have equal shares after some rounds."""
    budget, tenants = BodyBudget(TOTAL), [tenant(number) for number in range(5)]
    taken = {owner: fill(budget, owner) for owner in tenants}
    for _ in range(200):
        for owner in tenants:
            budget.give_back(owner, taken[owner] // CHUNK // 4 * CHUNK)
            taken[owner] -= taken[owner] // CHUNK // 4 * CHUNK
            taken[owner] += fill(budget, owner)
    even = TOTAL / (len(tenants) + FREE_PER_SHARE)
    assert all(abs(size - even) < 0.1 * even for size in taken.values())


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, TOTAL // 3), st.booleans()), max_size=60))
def test_every_grant_leaves_three_times_the_tenants_bytes_free(steps: list[tuple[int, int, bool]]) -> None:
    budget, bodies = BodyBudget(TOTAL), dict.fromkeys(range(6), 0)
    for number, size, ends in steps:
        if ends and bodies[number]:
            budget.give_back(tenant(number), bodies[number])
            bodies[number] = 0
            continue
        free = TOTAL - sum(bodies.values())
        try:
            budget.take(tenant(number), size)
        except GatewayError:
            assert FREE_PER_SHARE * (bodies[number] + size) > free - size
        else:
            bodies[number] += size
            assert FREE_PER_SHARE * bodies[number] <= free - size
    for number, size in bodies.items():
        budget.give_back(tenant(number), size)
    assert fill(budget, tenant(9)) == TOTAL // 4


def test_a_lease_returns_its_bytes_once() -> None:
    budget = BodyBudget(TOTAL)
    with pytest.raises(ShareExceeded), budget.lease(tenant(1)) as lease:
        lease.grow(CHUNK)
        lease.release()
        lease.grow(TOTAL // 8)
        lease.grow(TOTAL // 4)
    assert fill(budget, tenant(1)) == TOTAL // 4
