"""Credits and invoices. Invariant: grants, entries, lines and final invoices are never changed; triggers refuse it. Only the
payment or the cancellation of a final invoice is added to it.
"""

from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Identity, Index, Numeric, func, text
from sqlalchemy.dialects.postgresql import CHAR
from sqlalchemy.orm import Mapped, mapped_column
from sqlalchemy.schema import UniqueConstraint

from loraplex.tenants.invoices.records import INVOICE_STATES, MAX_CREDIT_MICRO
from loraplex.tenants.tables import Base, BigInt, one_of

LINE_KINDS = ("usage", "adjustment", "minimum")
CREDIT_ACCOUNTS = ("issued", "available", "consumed")
MONTH = r"^20\d{2}-(0[1-9]|1[0-2])$"


class CreditGrant(Base):
    """A credit as it was granted, in micro-units. What is left of it is the sum of its entries in the account `available`."""

    __tablename__ = "credit_grants"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        CheckConstraint(f"amount_micro BETWEEN 1 AND {MAX_CREDIT_MICRO}", name="amount_micro"),
        CheckConstraint("priority BETWEEN 0 AND 100", name="priority"),
        CheckConstraint("expires_at > granted_at", name="expires_at"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    currency: Mapped[str] = mapped_column(CHAR(3))
    amount_micro: Mapped[BigInt]
    priority: Mapped[int]
    expires_at: Mapped[datetime | None]
    reason: Mapped[str]
    granted_at: Mapped[datetime] = mapped_column(server_default=func.now())


class CreditEntry(Base):
    """One side of a transaction between two accounts of a grant. The entries of a transaction sum to zero.

    `issued` to `available`: the grant; `available` to `consumed`: an invoice uses it; back: that invoice is void.
    """

    __tablename__ = "credit_entries"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "grant_id"], ["credit_grants.tenant_id", "credit_grants.id"]),
        ForeignKeyConstraint(["tenant_id", "invoice_id"], ["invoices.tenant_id", "invoices.id"]),
        Index("ix_credit_entries_tenant_id_grant_id", "tenant_id", "grant_id"),
        Index("ix_credit_entries_transaction_id", "transaction_id"),
        CheckConstraint(one_of("account", CREDIT_ACCOUNTS), name="account"),
        CheckConstraint("amount_micro <> 0", name="amount_micro"),
    )

    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    transaction_id: Mapped[UUID]
    grant_id: Mapped[UUID]
    invoice_id: Mapped[UUID | None]
    account: Mapped[str]
    amount_micro: Mapped[BigInt]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Invoice(Base):
    """The invoice of one tenant, month (UTC) and currency. `attempt` counts from 0: the void ones before it.

    A draft has no lines and no number; it is computed whenever it is read, and becomes final after `grace_ends_at`. The rest is
    stored then and never changes, `credit_balances` too: the credits that were left before.
    """

    __tablename__ = "invoices"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        UniqueConstraint("tenant_id", "month", "currency", "attempt"),
        UniqueConstraint("issuer", "number"),
        Index(
            "uq_invoices_living",
            *("tenant_id", "month", "currency"),
            unique=True,
            postgresql_where=text("state <> 'void'"),
        ),
        Index("ix_invoices_drafts", "grace_ends_at", postgresql_where=text("state = 'draft'")),
        Index("ix_invoices_created_at_id", "created_at", "id"),
        CheckConstraint(f"month ~ '{MONTH}'", name="month"),
        CheckConstraint(one_of("state", INVOICE_STATES), name="state"),
        CheckConstraint("attempt >= 0", name="attempt"),
        CheckConstraint(
            "num_nonnulls(number, finalized_at, issuer, customer_name, customer_address, tax_rate_ppm, minimum_micro,"
            " credit_balances, subtotal_micro, credits_micro, tax_micro, rounding_micro, total_micro)"
            " = CASE state WHEN 'draft' THEN 0 ELSE 13 END",
            name="final",
        ),
        CheckConstraint(
            "num_nonnulls(paid_at, paid_reference) = CASE state WHEN 'paid' THEN 2 ELSE 0 END", name="paid"
        ),
        CheckConstraint("(voided_at IS NOT NULL) = (state = 'void')", name="void"),
        CheckConstraint(
            "credits_micro >= 0 AND total_micro = subtotal_micro - credits_micro + tax_micro + rounding_micro",
            name="total_micro",
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    month: Mapped[str]
    currency: Mapped[str] = mapped_column(CHAR(3))
    attempt: Mapped[int]
    state: Mapped[str]
    grace_ends_at: Mapped[datetime]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    number: Mapped[BigInt | None]
    finalized_at: Mapped[datetime | None]
    issuer: Mapped[str | None]
    customer_name: Mapped[str | None]
    customer_address: Mapped[str | None]
    vat_id: Mapped[str | None]
    tax_rate_ppm: Mapped[int | None]
    minimum_micro: Mapped[BigInt | None]
    credit_balances: Mapped[list[dict[str, Any]] | None]
    subtotal_micro: Mapped[BigInt | None]
    credits_micro: Mapped[BigInt | None]
    tax_micro: Mapped[BigInt | None]
    rounding_micro: Mapped[BigInt | None]
    total_micro: Mapped[BigInt | None]
    paid_at: Mapped[datetime | None]
    paid_reference: Mapped[str | None]
    voided_at: Mapped[datetime | None]


class InvoiceLineRow(Base):
    """A line of a final invoice. `billed_tokens` and `billed_pico`: what earlier invoices billed under the same key.

    It outlives adapters, so it has their name without a foreign key.
    """

    __tablename__ = "invoice_lines"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "invoice_id"], ["invoices.tenant_id", "invoices.id"]),
        CheckConstraint(one_of("kind", LINE_KINDS), name="kind"),
        CheckConstraint(f"month ~ '{MONTH}'", name="month"),
        CheckConstraint("price IS NULL OR amount_pico = tokens::numeric * price", name="amount_pico"),
        CheckConstraint("abs(amount_micro::numeric * 1000000 - amount_pico) <= 500000", name="amount_micro"),
    )

    invoice_id: Mapped[UUID] = mapped_column(primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"), index=True)
    kind: Mapped[str]
    month: Mapped[str]
    adapter_id: Mapped[UUID | None]
    adapter: Mapped[str | None]
    token_class: Mapped[str | None]
    price_version_id: Mapped[UUID | None] = mapped_column(ForeignKey("price_versions.id"))
    price: Mapped[BigInt | None]
    tokens: Mapped[BigInt]
    amount_pico: Mapped[Decimal] = mapped_column(Numeric(38, 0))
    amount_micro: Mapped[BigInt]
    billed_tokens: Mapped[BigInt]
    billed_pico: Mapped[Decimal] = mapped_column(Numeric(38, 0))


class InvoiceNumber(Base):
    """The last number of an issuer: they have no gaps, since it is raised in the transaction that makes an invoice final."""

    __tablename__ = "invoice_numbers"

    issuer: Mapped[str] = mapped_column(primary_key=True)
    last_number: Mapped[BigInt]
