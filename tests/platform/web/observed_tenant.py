"""A tenant with requests of three hours, refusals and limits, for the pages that observe."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
from tests.tenants.ledger.stored_usage import Used, UsingTenant, make_tenant, settle
from tests.tenants.ledger.test_request_reports import refuse

HOUR = timedelta(hours=1)
APART = timedelta(milliseconds=10)
LIMITS = {
    "degraded": False,
    "met": [
        ["tenant", "tokens_per_minute", 5000, 1000, 500, 1450],
        ["key", "budget_per_day", 2_000_000, 1_500_000, 90_000, 8123],
    ],
}
PHASES = {
    "queue": [18, 211, {"before": 2, "limit": "rows"}],
    "adapter_load": [4, 14],
    "prefill": [229, 233],
    "decode": [462, 1944],
}
"""Those without causes are as earlier releases stored them."""


@dataclass(frozen=True)
class ObservedTenant:
    """`now` is the time of the newest request, which is `slow`; `requests` are all ids, oldest first."""

    tenant: UsingTenant
    now: datetime
    requests: list[UUID]
    slow: UUID

    @property
    def id(self) -> UUID:
        return self.tenant.id

    @property
    def key_id(self) -> str:
        return next(iter(self.tenant.keys))


def observed_tenant(url: str, now: datetime | None = None, **limits: int) -> ObservedTenant:
    """Two hours ago two requests of support and a failed one, an hour ago one of the base model, now one of coral; and four
    refusals by a limit an hour ago. All at the first price in USD. `limits` are those of the tenant.
    """
    now = now or datetime.now(UTC).replace(second=0, microsecond=0)
    tenant = make_tenant(url)
    key, version = next(iter(tenant.keys.values())), tenant.version("USD")
    one = Used(
        tenant.adapters["support"], key, now - 2 * HOUR, ttft_ms=60, duration_ms=900, price_version_id=version
    )
    slow = replace(
        *(one,),
        adapter_id=tenant.adapters["coral"],
        at=now,
        uncached=1000,
        cached=384,
        completion=66,
        ttft_ms=462,
        duration_ms=2406,
        phases=PHASES,
        limits=LIMITS,
        client_request_id="mine-1",
    )
    second = replace(one, at=one.at + APART)
    failed = replace(one, at=one.at + 2 * APART, outcome="failed", ttft_ms=None, completion=0)
    requests = settle(url, tenant, [one, second, failed, replace(one, adapter_id=None, at=now - HOUR), slow])
    refuse(url, tenant, (now - HOUR).replace(minute=0, second=0, microsecond=0), "rate_limit_exceeded", 4)
    if limits:
        set_limits(url, tenant.id, **limits)
    return ObservedTenant(tenant, now, requests, requests[-1])


def set_limits(url: str, tenant_id: UUID, **limits: Any) -> None:
    """Insert a row of limits: of the tenant, or of a key or an adapter by `api_key_id` or `adapter_id`."""
    columns = ", ".join(limits)
    places = ", ".join(["%s"] * len(limits))
    with psycopg.connect(url) as connection:
        connection.execute(
            f"INSERT INTO quotas (id, tenant_id, {columns}) VALUES (gen_random_uuid(), %s, {places})".encode(),
            [tenant_id, *limits.values()],
        )
