"""Rate cards, their price versions, and the billing data of tenants.

Invariant: the versions of one card never overlap, and none changes but for its end, which is set while it lies in the future.
"""

from datetime import date, datetime
from uuid import UUID

from sqlalchemy import (
    CHAR,
    CheckConstraint,
    ForeignKey,
    Identity,
    Index,
    UniqueConstraint,
    func,
    literal_column,
    true,
)
from sqlalchemy.dialects.postgresql import TSTZRANGE, ExcludeConstraint, Range
from sqlalchemy.orm import Mapped, mapped_column

from loraplex.tenants.names import ADAPTER_NAME, TENANT_NAME
from loraplex.tenants.tables import Base, BigInt, Revision

CURRENCY = r"^[A-Z]{3}$"
# That of `billing.pricing`, which this layer does not import.
MAX_PRICE = 10_000_000_000
SCOPE = """scope = CASE
    WHEN num_nonnulls(tier, tenant_id, adapter_name) = 0 THEN 'all'
    WHEN tier IS NOT NULL AND num_nonnulls(tenant_id, adapter_name) = 0 THEN 'tier'
    WHEN tier IS NULL AND tenant_id IS NOT NULL AND adapter_name IS NULL THEN 'tenant'
    WHEN tier IS NULL AND tenant_id IS NOT NULL THEN 'adapter'
    ELSE '' END"""


class RateCard(Base):
    """What a price applies to, in one currency: all requests, those of a tier, of a tenant, or of a tenant's adapter by its
    name. `scope` says which: `all`, `tier`, `tenant`, `adapter`.
    """

    __tablename__ = "rate_cards"
    __table_args__ = (
        UniqueConstraint("tier", "tenant_id", "adapter_name", "currency", postgresql_nulls_not_distinct=True),
        Index("ix_rate_cards_tenant_id", "tenant_id"),
        CheckConstraint(SCOPE, name="scope"),
        CheckConstraint(f"tier ~ '{TENANT_NAME}'", name="tier"),
        CheckConstraint(f"adapter_name ~ '{ADAPTER_NAME}'", name="adapter_name"),
        CheckConstraint(f"currency ~ '{CURRENCY}'", name="currency"),
    )

    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True)
    scope: Mapped[str]
    tier: Mapped[str | None]
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenants.id"))
    adapter_name: Mapped[str | None]
    currency: Mapped[str] = mapped_column(CHAR(3))


class PriceVersion(Base):
    """A price of a card from the start of `effective` until its end, exclusive. `id` is a UUIDv7, which usage names.

    Prices in micro-units of money per million tokens; `reasoning` null: as `completion`. A trigger refuses every change but an
    end in the future.
    """

    __tablename__ = "price_versions"
    __table_args__ = (
        UniqueConstraint("rate_card_id", "version"),
        # A range of one number: equality in a GiST index would need an extension.
        ExcludeConstraint(
            (literal_column("int8range(rate_card_id, rate_card_id, '[]')"), "&&"),
            ("effective", "&&"),
            name="ex_price_versions_effective",
            using="gist",
        ),
        CheckConstraint("version >= 1", name="version"),
        CheckConstraint(
            f"prompt BETWEEN 0 AND {MAX_PRICE} AND cached_prompt BETWEEN 0 AND prompt"
            f" AND completion BETWEEN 0 AND {MAX_PRICE}",
            name="prices",
        ),
        CheckConstraint(f"reasoning BETWEEN 0 AND {MAX_PRICE}", name="reasoning"),
        CheckConstraint(
            "NOT isempty(effective) AND lower_inc(effective) AND NOT upper_inc(effective)", name="effective"
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    rate_card_id: Mapped[BigInt] = mapped_column(ForeignKey("rate_cards.id"))
    version: Mapped[int]
    prompt: Mapped[BigInt]
    cached_prompt: Mapped[BigInt]
    completion: Mapped[BigInt]
    reasoning: Mapped[BigInt | None]
    effective: Mapped[Range[datetime]] = mapped_column(TSTZRANGE)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class TenantBilling(Base):
    """What the bills of a tenant show. A tenant without a row has none of it, no tax and no minimum.

    `currency` null: that of the installation. `next_currency` replaces it at 00:00 UTC of `next_currency_from`, the first day
    of a month. `tax_rate_ppm`: millionths; 190,000 is 19 %. `minimum_micro`: the least amount of a month, in micro-units.
    """

    __tablename__ = "tenant_billing"
    __table_args__ = (
        CheckConstraint(f"currency ~ '{CURRENCY}' AND next_currency ~ '{CURRENCY}'", name="currency"),
        CheckConstraint(
            "num_nulls(next_currency, next_currency_from) IN (0, 2)"
            " AND extract(day FROM next_currency_from) = 1",
            name="next_currency",
        ),
        CheckConstraint("tax_rate_ppm BETWEEN 0 AND 1000000", name="tax_rate_ppm"),
        CheckConstraint("minimum_micro >= 0", name="minimum_micro"),
    )

    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    currency: Mapped[str | None] = mapped_column(CHAR(3))
    next_currency: Mapped[str | None] = mapped_column(CHAR(3))
    next_currency_from: Mapped[date | None]
    issuer: Mapped[str | None]
    customer_name: Mapped[str | None]
    customer_address: Mapped[str | None]
    vat_id: Mapped[str | None]
    tax_rate_ppm: Mapped[int] = mapped_column(server_default="0")
    minimum_micro: Mapped[BigInt] = mapped_column(server_default="0")
    revision: Mapped[Revision]
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())


class PriceEpoch(Base):
    """One row: a number that grows, by triggers, with every change that a price depends on."""

    __tablename__ = "price_epochs"
    __table_args__ = (CheckConstraint("singleton", name="singleton"),)

    singleton: Mapped[bool] = mapped_column(primary_key=True, server_default=true())
    epoch: Mapped[BigInt]
