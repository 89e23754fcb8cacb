"""A tenant with rate cards and usage, written as the ledger writes them: a row with its hourly and monthly rollups in one transaction."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import update
from sqlalchemy.dialects.postgresql import Range, insert
from sqlalchemy.ext.asyncio import AsyncSession
from tests.tenants.registry_records import make_tenant

from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.database import Database
from loraplex.tenants.ids import uuid7
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.models import (
    NO_ID,
    PriceVersion,
    RateCard,
    Tenant,
    TenantBilling,
    UsageRecord,
    UsageRollup,
)

KEY: Final = UUID(int=7)
BEGIN: Final = datetime(2026, 1, 1, tzinfo=UTC)


def now() -> datetime:
    """The time of a test that meets the server's clock: drawn when it runs."""
    return datetime.now(UTC)


def last_month() -> Month:
    """The month that can be closed now."""
    return Month.of(now()).previous


@dataclass(frozen=True)
class BilledTenant:
    """`versions`: the price versions by currency; each is in force from `BEGIN` on."""

    database: Database
    id: UUID
    versions: Mapping[str, UUID]
    prices: Mapping[UUID, Price]

    async def use(
        self,
        at: datetime,
        uncached: int = 0,
        cached: int = 0,
        completion: int = 0,
        *,
        reasoning: int = 0,
        currency: str = "USD",
        adapter_id: UUID | None = None,
        kind: str = "usage",
        amount_pico: int | None = None,
        with_version: bool = True,
    ) -> UUID:
        """Write the usage of one request. `with_version` False: from before rate cards."""
        version = self.versions[currency] if with_version else None
        price = Price() if version is None else self.prices[version]
        amount = (
            price.amount_pico(uncached + cached, cached, completion, reasoning)
            if amount_pico is None
            else amount_pico
        )
        tokens = {"uncached_tokens": uncached, "cached_tokens": cached, "completion_tokens": completion}
        tokens["reasoning_tokens"] = reasoning
        charged = tokens | {"amount_pico": amount}
        row = UsageRecord(
            id=uuid7(),
            tenant_id=self.id,
            kind=kind,
            reverses_id=uuid7() if kind == "correction" else None,
            reason="counted twice" if kind == "correction" else None,
            api_key_id=KEY,
            adapter_id=adapter_id,
            outcome="completed",
            price_version_id=version,
            currency=currency,
            day=f"d:{at:%Y-%m-%d}",
            month=f"m:{at:%Y-%m}",
            admitted_at=at,
            **charged,
        )
        async with self.database.as_writer() as session:
            session.add(row)
            await session.flush()
            await _roll_up(session, row, charged)
        return row.id

    async def set_terms(self, **terms: Any) -> None:
        """Set billing data: columns of `TenantBilling`."""
        async with self.database.as_operator() as session:
            statement = insert(TenantBilling).values(tenant_id=self.id, **terms)
            await session.execute(
                statement.on_conflict_do_update(index_elements=["tenant_id"], set_=terms or {"issuer": None})
            )


async def _roll_up(session: AsyncSession, row: UsageRecord, charged: Mapping[str, int]) -> None:
    key = {
        "tenant_id": row.tenant_id,
        "hour": row.admitted_at.replace(minute=0, second=0, microsecond=0),
        "adapter_id": row.adapter_id or NO_ID,
        "api_key_id": row.api_key_id,
        "price_version_id": row.price_version_id or NO_ID,
        "currency": row.currency,
    }
    sums = {"requests": int(row.kind == "usage"), **charged}
    statement = insert(UsageRollup).values(**key, **sums)
    added = {name: getattr(UsageRollup, name) + getattr(statement.excluded, name) for name in sums}
    await session.execute(statement.on_conflict_do_update(index_elements=list(key), set_=added))


async def make_billed_tenant(
    database: Database, name: str = "acme", prices: Mapping[str, Price] | None = None
) -> BilledTenant:
    """Create a tenant with a card of its own in each currency of `prices`; it is charged in the first."""
    return await bill(database, await make_tenant(database, name), prices)


async def bill(
    database: Database, tenant_id: UUID, prices: Mapping[str, Price] | None = None
) -> BilledTenant:
    """Give a tenant cards of its own, and let it exist since `BEGIN`."""
    given = prices or {"USD": Price(prompt=1_500_000, cached_prompt=150_000, completion=6_000_001)}
    versions = {}
    async with database.as_operator() as session:
        await session.execute(update(Tenant).where(Tenant.id == tenant_id).values(created_at=BEGIN))
        for currency, price in given.items():
            card = RateCard(scope="tenant", tenant_id=tenant_id, currency=currency)
            session.add(card)
            await session.flush()
            versions[currency] = uuid7()
            session.add(
                PriceVersion(
                    id=versions[currency],
                    rate_card_id=card.id,
                    version=1,
                    prompt=price.prompt,
                    cached_prompt=price.cached_prompt,
                    completion=price.completion,
                    reasoning=price.reasoning,
                    effective=Range(BEGIN, None),
                )
            )
        session.add(TenantBilling(tenant_id=tenant_id, currency=next(iter(given))))
    by_version = {versions[currency]: price for currency, price in given.items()}
    return BilledTenant(database, tenant_id, versions, by_version)
