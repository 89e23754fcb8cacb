"""The limit on the tokens of one session, from admission to the row of the ledger; and what holds of it without the counters."""

from dataclasses import replace

import pytest
from tests.tenants.admission.gateways import TenantWithGateways, make_tenant_with_gateways, usage

from loraplex.platform.inference.rate_limit_headers import refusal_headers
from loraplex.tenants.database import Database
from loraplex.tenants.errors import QuotaExhausted, QuotaUnavailable, RateLimited
from loraplex.tenants.quotas.reservation import ReservationRequest

SESSION = "ses_0123456789abcdef0123456789abcdef"


def in_session(
    tenant: TenantWithGateways, prompt: int = 10, completion: int = 20, session: str = SESSION
) -> ReservationRequest:
    return replace(tenant.request(prompt, completion), session=session)


async def test_a_session_that_is_used_up_is_refused_for_good(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_session=50)
    async with tenant.gateway() as gateway:
        first = await gateway.admit(in_session(tenant))
        assert [(each.level, each.name, each.left) for each in first.limits] == [
            ("tenant", "tokens_per_session", 20)
        ]
        with pytest.raises(RateLimited):
            await gateway.admit(in_session(tenant, completion=11))
        await gateway.settle(first, usage(first, 5))
        second = await gateway.admit(in_session(tenant, completion=25))
        await gateway.settle(second, replace(usage(second, 25), reasoning_tokens=9))
        asked = in_session(tenant, prompt=1, completion=0)
        with pytest.raises(
            QuotaExhausted, match="tokens_per_session of the tenant is 50: 50 used"
        ) as refused:
            await gateway.admit(asked)
        assert (refused.value.limit, refused.value.level) == ("tokens_per_session", "tenant")
        headers = refusal_headers(refused.value)
        assert headers["x-should-retry"] == "false" and "retry-after" not in headers
        explained = await gateway.explain(tenant.tenant_id, asked.request_id)
        assert explained is not None
        assert [each.name for each in explained.decisions if not each.passed] == ["tokens_per_session"]
        await gateway.cancel(await gateway.admit(in_session(tenant, session="ses_other")))
        await gateway.cancel(await gateway.admit(tenant.request(100, 100)))
        await tenant.shipped()
    rows = await tenant.rows(
        "SELECT session, completion_tokens, reasoning_tokens FROM usage_records ORDER BY id"
    )
    assert [tuple(row.values()) for row in rows] == [(SESSION, 5, 0), (SESSION, 25, 9)]


async def test_a_default_maximum_is_lowered_to_what_the_session_has_left(
    database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_session=90)
    async with tenant.gateway() as gateway:
        used = await gateway.admit(in_session(tenant))
        await gateway.settle(used, usage(used, 20))
        for request, unused, most in (
            (in_session(tenant, 10, 0), False, 80),
            (in_session(tenant, 10, 0), True, 50),
            (in_session(tenant, 10, 0, "ses_other"), True, 80),
            (tenant.request(10, 0), True, None),
        ):
            allowance = await gateway.allowance(request, unused=unused)
            assert allowance.completion_tokens == most, (request.session, unused)


async def test_without_the_counters_only_requests_without_a_session_are_admitted(
    database: Database, valkey_url: str
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_session=90)
    async with tenant.gateway() as gateway:
        gateway.maintenance.breaker.is_open = True
        with pytest.raises(QuotaUnavailable, match="session's quota is unknown") as refused:
            await gateway.admit(in_session(tenant))
        assert refused.value.limit == "tokens_per_session"
        admitted = await gateway.admit(tenant.request())
        assert admitted.degraded
        await gateway.cancel(admitted)


async def test_a_recount_keeps_what_sessions_have_used(database: Database, valkey_url: str) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_session=60)
    async with tenant.gateway() as gateway:
        used = await gateway.admit(in_session(tenant))
        await gateway.settle(used, usage(used, 10))
        running = await gateway.admit(in_session(tenant))
        await tenant.shipped()
        await gateway.recount(tenant.tenant_id)
        with pytest.raises(RateLimited):
            await gateway.admit(in_session(tenant, 11, 0))
        await gateway.settle(running, usage(running, 20))
        with pytest.raises(QuotaExhausted, match="50 used"):
            await gateway.admit(in_session(tenant, 11, 0))
        await tenant.shipped()
        await tenant.flush()
        await gateway.cancel(await gateway.admit(in_session(tenant, 60, 0)))
