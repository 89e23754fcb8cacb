"""What one reservation may have at most: exactly what fits every limit at its own size, whatever is used of it."""

from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tenants.admission.gateways import PRICE, make_tenant_with_gateways

from loraplex.tenants.admission.allowance import completion_tokens_within
from loraplex.tenants.billing.pricing import Price, PriceVersion
from loraplex.tenants.database import Database
from loraplex.tenants.errors import QuotaExhausted, RateLimited
from loraplex.tenants.quotas.limits import BUDGETS, NANO_PER_MICRO, QuotaLimits

TOKENS = ("tokens_per_minute", "tokens_per_day", "tokens_per_month")
SMALL = st.none() | st.integers(0, 200)
LIMITS = st.builds(QuotaLimits, **{name: SMALL for name in (*TOKENS, *sorted(BUDGETS))})
PRICES = st.builds(Price, prompt=st.integers(0, 10**6), completion=st.integers(0, 10**6))


def fits(limits: QuotaLimits, price: Price, prompt: int, completion: int) -> bool:
    """Whether the counters would admit such a request where nothing is used."""
    tokens = [limit for name in TOKENS if (limit := limits.get(name)) is not None]
    budgets = [limit for name in BUDGETS if (limit := limits.get(name)) is not None]
    amount = price.bound_nano(prompt, completion)
    return all(prompt + completion <= each for each in tokens) and all(
        amount <= each * NANO_PER_MICRO for each in budgets
    )


@given(st.lists(LIMITS, min_size=1, max_size=3), st.lists(PRICES, min_size=1, max_size=3), st.integers(0, 50))
def test_it_is_the_largest_that_fits_all(levels: list[QuotaLimits], prices: list[Price], prompt: int) -> None:
    versions = [PriceVersion(id=uuid4(), currency="USD", price=price) for price in prices]
    most = completion_tokens_within(levels, prompt, int, lambda: versions)

    def admitted(completion: int) -> bool:
        return all(fits(limits, price, prompt, completion) for limits in levels for price in prices)

    if most is None:
        assert admitted(10**9)
    elif most < 0:
        assert not admitted(0)
    else:
        assert admitted(most) and not admitted(most + 1)


@pytest.mark.parametrize("limit", [*TOKENS, *sorted(BUDGETS)])
async def test_the_counters_admit_it_and_no_token_more(
    database: Database, valkey_url: str, limit: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, "acme", **{limit: 90})
    async with tenant.gateway() as gateway:
        allowance = await gateway.allowance(tenant.request(prompt=10, completion=0))
        most = allowance.completion_tokens
        assert most == (80 if limit in TOKENS else PRICE.completion_tokens_within(90 * NANO_PER_MICRO, 10))
        assert most is not None and allowance.default_max_tokens is None
        with pytest.raises(QuotaExhausted) as refused:
            await gateway.admit(tenant.request(prompt=10, completion=most + 1))
        assert refused.value.limit == limit
        admitted = await gateway.admit(tenant.request(prompt=10, completion=most))
        # What is used changes nothing: the next one may wait for it, but is as large.
        assert await gateway.allowance(tenant.request(prompt=10, completion=0)) == allowance
        await gateway.cancel(admitted)


async def test_without_valkey_it_is_this_gateways_share(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, "acme", tokens_per_minute=90)
    async with tenant.gateway() as gateway:
        gateway.maintenance.local_limiter.count_gateways(2)
        gateway.maintenance.breaker.is_open = True
        allowance = await gateway.allowance(tenant.request(prompt=10, completion=0))
        assert allowance.completion_tokens == 45 - 10
        with pytest.raises(RateLimited):
            await gateway.admit(tenant.request(prompt=10, completion=36))
        admitted = await gateway.admit(tenant.request(prompt=10, completion=35))
        assert admitted.degraded
        await gateway.cancel(admitted)
