"""A tenant with adapters, keys and prices, and requests that are settled by the statement of the ledger itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg

from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.ids import uuid7, uuid7_from
from loraplex.tenants.ledger.histograms import BUCKETS, TTFT_BOUNDS_MS, bucket_of
from loraplex.tenants.ledger.statements import SETTLE
from loraplex.tenants.ledger.usage_ledger import to_json
from loraplex.tenants.periods import periods_of

ADAPTERS = ("coral", "support")
CURRENCIES = ("EUR", "USD")


@dataclass(frozen=True)
class Used:
    """One request as it is settled. `price` None: from before rate cards, at an amount of its own."""

    adapter_id: UUID | None
    api_key_id: UUID
    at: datetime
    uncached: int = 10
    cached: int = 4
    completion: int = 6
    price_version_id: UUID | None = None
    currency: str = "USD"
    amount_pico: int = 0
    outcome: str = "completed"
    client_request_id: str | None = None
    ttft_ms: int | None = None
    duration_ms: int | None = None
    phases: dict[str, list[int]] | None = None
    limits: dict[str, Any] | None = None
    id: UUID | None = None
    reverses_id: UUID | None = None
    adapter_version: int = 1
    reasoning: int = 0
    session: str | None = None
    alias: str | None = None
    unsatisfied: bool = False


@dataclass(frozen=True)
class UsingTenant:
    """Ids by their names. `prices`: two versions of each currency, by their ids."""

    id: UUID
    name: str
    adapters: dict[str, UUID]
    keys: dict[str, UUID]
    prices: dict[UUID, Price] = field(default_factory=dict)
    currencies: dict[UUID, str] = field(default_factory=dict)

    def priced(self, used: Used) -> Used:
        """With the exact amount of its price version."""
        if used.price_version_id is None:
            return used
        price = self.prices[used.price_version_id]
        prompt = used.uncached + used.cached
        amount = price.amount_pico(prompt, used.cached, used.completion, used.reasoning)
        return replace(used, amount_pico=amount, currency=self.currencies[used.price_version_id])

    def version(self, currency: str, number: int = 0) -> UUID:
        return [each for each, of in self.currencies.items() if of == currency][number]


def make_tenant(url: str, name: str | None = None) -> UsingTenant:
    """As a superuser: row-level security does not bind it."""
    tenant_id, name = uuid4(), name or f"t{uuid4().hex[:12]}"
    tenant = UsingTenant(
        tenant_id,
        name,
        {each: uuid4() for each in ADAPTERS},
        {uuid4().hex[:16]: uuid4() for _ in range(2)},
    )
    with psycopg.connect(url) as connection:
        connection.execute("INSERT INTO tenants (id, name) VALUES (%s, %s)", [tenant_id, name])
        for adapter, adapter_id in tenant.adapters.items():
            connection.execute(
                "INSERT INTO adapters (id, tenant_id, name, description) VALUES (%s, %s, %s, '')",
                [adapter_id, tenant_id, adapter],
            )
        for key_id, key in tenant.keys.items():
            connection.execute(
                "INSERT INTO api_keys (id, tenant_id, key_id, environment, secret_sha256, name, scopes)"
                " VALUES (%s, %s, %s, 'live', %s, 'k', '{inference}')",
                [key, tenant_id, key_id, b"x" * 32],
            )
        for currency in CURRENCIES:
            card = connection.execute(
                "INSERT INTO rate_cards (scope, tenant_id, currency) VALUES ('tenant', %s, %s) RETURNING id",
                [tenant_id, currency],
            ).fetchone()
            assert card is not None
            for version, price in enumerate(
                (
                    Price(prompt=3_000_001, cached_prompt=1, completion=7_000_003),
                    Price(prompt=5, completion=11, reasoning=23),
                ),
                start=1,
            ):
                version_id = uuid7()
                connection.execute(
                    "INSERT INTO price_versions (id, rate_card_id, version, prompt, cached_prompt, completion, reasoning,"
                    " effective) VALUES (%s, %s, %s, %s, %s, %s, %s, tstzrange(%s, %s))",
                    [
                        *(version_id, card[0], version, price.prompt, price.cached_prompt, price.completion),
                        price.reasoning,
                        *(f"{2019 + version}-01-01Z", f"{2020 + version}-01-01Z"),
                    ],
                )
                tenant.prices[version_id] = price
                tenant.currencies[version_id] = currency
    return tenant


def settle(url: str, tenant: UsingTenant, requests: Sequence[Used]) -> list[UUID]:
    """Settle all of them in one transaction; return their ids."""
    rows = [_row(tenant, tenant.priced(each)) for each in requests]
    with psycopg.connect(url) as connection:
        connection.execute(SETTLE.encode(), [to_json(rows)])
    return [row["id"] for row in rows]


def _row(tenant: UsingTenant, used: Used) -> dict[str, Any]:
    periods = periods_of(used.at)
    return {
        "id": used.id or UUID(int=uuid7_from(used.at - timedelta(milliseconds=3)).int | uuid4().int >> 66),
        "tenant_id": tenant.id,
        "kind": "usage" if used.reverses_id is None else "correction",
        "reverses_id": used.reverses_id,
        "reason": None if used.reverses_id is None else "a mistake",
        "client_request_id": used.client_request_id,
        "api_key_id": used.api_key_id,
        "adapter_id": used.adapter_id,
        "adapter_version": None if used.adapter_id is None else used.adapter_version,
        "digest": None if used.adapter_id is None else "a" * 64,
        "outcome": used.outcome,
        "uncached_tokens": used.uncached,
        "cached_tokens": used.cached,
        "completion_tokens": used.completion,
        "price_version_id": used.price_version_id,
        "currency": used.currency,
        "amount_pico": used.amount_pico,
        "day": periods.day,
        "month": periods.month,
        "admitted_at": used.at,
        "ttft_ms": used.ttft_ms,
        "ttft_bucket": None if used.ttft_ms is None else bucket_of(TTFT_BOUNDS_MS, used.ttft_ms),
        "duration_ms": used.duration_ms,
        "gap_buckets": [0] * BUCKETS,
        "phases": used.phases,
        "limits": used.limits,
        "reasoning_tokens": used.reasoning,
        "session": used.session,
        "alias": used.alias,
        "unsatisfied": used.unsatisfied,
    }
