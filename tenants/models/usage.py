"""The usage ledger, its rollups and totals, and the phases of requests. Invariant: a row of the ledger is written once per
request and never changed; rollups and totals are its sums, written in the same transaction.
"""

from datetime import datetime
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

from sqlalchemy import (
    CHAR,
    BigInteger,
    CheckConstraint,
    ForeignKey,
    Identity,
    Index,
    Numeric,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from loraplex.tenants.tables import Base, BigInt, one_of

LEVELS = ("tenant", "key", "adapter")
OUTCOMES = ("completed", "aborted", "failed", "revoked", "unknown")
KINDS = ("usage", "correction")
PERIOD = r"^(d:\d{4}-\d{2}-\d{2}|m:\d{4}-\d{2})$"
NO_ID: Final = UUID(int=0)
"""In a rollup: the base model as `adapter_id`, and rows from before rate cards as `price_version_id`."""
REST: Final = UUID(int=2**128 - 1)
"""In a report: all adapters or keys that it does not name."""


class UsageRecord(Base):
    """One row of the ledger: the usage of a request in disjoint token classes, or a correction of such a row.

    `id` is a UUIDv7, from which the month of the partition follows; `client_request_id` is the client's `x-request-id`.
    `amount_pico` is tokens times micro-units per million tokens: exact, never rounded. A correction names what it reverses and
    has its negative tokens and amount. `completion_tokens` includes `reasoning_tokens`. `price_version_id` is null for rows
    from before rate cards. A row outlives keys and adapters, so it names them without a foreign key. `system_fingerprint`: of
    the engine that ran the request; null for one that none had begun, and for rows from before it was kept. `session`: a label
    that the gateway made of what the client named so. `alias`: by which the version was chosen; null where the request named the
    version, or the base model. `unsatisfied`: the answer missed its schema.
    """

    __tablename__ = "usage_records"
    __table_args__ = (
        Index("ix_usage_records_tenant_id_id", "tenant_id", "id"),
        Index("ix_usage_records_tenant_id_client_request_id", "tenant_id", "client_request_id"),
        Index(
            *("ix_usage_records_tenant_id_session_id", "tenant_id", "session", "id"),
            postgresql_where=text("session IS NOT NULL"),
        ),
        Index(
            *("ix_usage_records_alias_settled_at", "tenant_id", "adapter_id", "alias", "settled_at"),
            postgresql_where=text("alias IS NOT NULL"),
        ),
        CheckConstraint(one_of("kind", KINDS), name="kind"),
        CheckConstraint(
            "num_nonnulls(reverses_id, reason) = CASE kind WHEN 'correction' THEN 2 ELSE 0 END",
            name="correction",
        ),
        CheckConstraint(one_of("outcome", OUTCOMES), name="outcome"),
        CheckConstraint(
            "kind = 'correction'"
            " OR uncached_tokens >= 0 AND cached_tokens >= 0 AND completion_tokens >= 0 AND amount_pico >= 0",
            name="amounts",
        ),
        CheckConstraint(f"day ~ '{PERIOD}' AND month ~ '{PERIOD}'", name="periods"),
        {"postgresql_partition_by": "RANGE (id)"},
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    kind: Mapped[str] = mapped_column(server_default="usage")
    reverses_id: Mapped[UUID | None]
    reason: Mapped[str | None]
    client_request_id: Mapped[str | None]
    api_key_id: Mapped[UUID]
    adapter_id: Mapped[UUID | None]
    adapter_version: Mapped[int | None]
    digest: Mapped[str | None] = mapped_column(CHAR(64))
    outcome: Mapped[str]
    uncached_tokens: Mapped[BigInt]
    cached_tokens: Mapped[BigInt]
    completion_tokens: Mapped[BigInt]
    price_version_id: Mapped[UUID | None]
    currency: Mapped[str] = mapped_column(CHAR(3))
    amount_pico: Mapped[BigInt]
    day: Mapped[str]
    month: Mapped[str]
    admitted_at: Mapped[datetime]
    settled_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ttft_ms: Mapped[int | None]
    duration_ms: Mapped[int | None]
    system_fingerprint: Mapped[str | None]
    reasoning_tokens: Mapped[BigInt] = mapped_column(server_default="0")
    session: Mapped[str | None]
    alias: Mapped[str | None]
    unsatisfied: Mapped[bool] = mapped_column(server_default="false")


class UsageRollup(Base):
    """The sum of the ledger's rows whose request was admitted in one hour (UTC); `requests` counts rows that are no
    corrections. `NO_ID`: the base model, or no price version.
    """

    __tablename__ = "usage_rollups"

    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    hour: Mapped[datetime] = mapped_column(primary_key=True)
    adapter_id: Mapped[UUID] = mapped_column(primary_key=True)
    api_key_id: Mapped[UUID] = mapped_column(primary_key=True)
    price_version_id: Mapped[UUID] = mapped_column(primary_key=True)
    currency: Mapped[str] = mapped_column(CHAR(3), primary_key=True)
    requests: Mapped[BigInt]
    uncached_tokens: Mapped[BigInt]
    cached_tokens: Mapped[BigInt]
    completion_tokens: Mapped[BigInt]
    amount_pico: Mapped[Decimal] = mapped_column(Numeric(38, 0))
    reasoning_tokens: Mapped[BigInt] = mapped_column(server_default="0")


class MonthlyRollup(Base):
    """The sum of the ledger's rows whose request was admitted in one month (UTC), by what makes a line of an invoice.

    `month`: its first moment. A trigger of `usage_records` adds each new row. `NO_ID` as in `UsageRollup`.
    """

    __tablename__ = "monthly_rollups"

    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    month: Mapped[datetime] = mapped_column(primary_key=True)
    adapter_id: Mapped[UUID] = mapped_column(primary_key=True)
    price_version_id: Mapped[UUID] = mapped_column(primary_key=True)
    currency: Mapped[str] = mapped_column(CHAR(3), primary_key=True)
    requests: Mapped[BigInt]
    uncached_tokens: Mapped[BigInt]
    cached_tokens: Mapped[BigInt]
    completion_tokens: Mapped[BigInt]
    amount_pico: Mapped[Decimal] = mapped_column(Numeric(38, 0))
    reasoning_tokens: Mapped[BigInt] = mapped_column(server_default="0")


class RequestRollup(Base):
    """The requests of one hour (UTC) by status: an outcome, or `refused_` and an error code.

    `ttft_buckets` counts their times to the first token, `gap_buckets` the times between two tokens, by the bounds of
    `tenants/ledger/histograms.py`.
    """

    __tablename__ = "request_rollups"
    __table_args__ = (
        CheckConstraint("cardinality(ttft_buckets) = 16 AND cardinality(gap_buckets) = 16", name="buckets"),
    )

    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    hour: Mapped[datetime] = mapped_column(primary_key=True)
    adapter_id: Mapped[UUID] = mapped_column(primary_key=True)
    api_key_id: Mapped[UUID] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(primary_key=True)
    requests: Mapped[BigInt]
    ttft_buckets: Mapped[list[int]] = mapped_column(ARRAY(BigInteger))
    gap_buckets: Mapped[list[int]] = mapped_column(ARRAY(BigInteger))


class RequestPhases(Base):
    """The phases of one request by name: `[start_ms, duration_ms, causes]` each, from the first of them; and limits.

    `limits`: `degraded`, whether those are of one gateway's share, and `met`, one `[level, name, limit, used, reserved,
    asked]` for each, budgets in micro-units; null of requests from before they were kept. Retention is shorter than that
    of the ledger, whose row has the same `id`.
    """

    __tablename__ = "request_phases"
    __table_args__ = {"postgresql_partition_by": "RANGE (id)"}  # noqa: RUF012 - the mapper reads it once

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID]
    phases: Mapped[dict[str, Any]]
    limits: Mapped[dict[str, Any] | None]


class FailedRequest(Base):
    """A request that failed or was refused, kept for a day. `message` and `model` quote nothing of its body but a name.

    `id`: the ledger row's id. A refused request has no row, so it gets its own. `key_id`: the public id of its key. `model`: the name
    that it asked for; null where that is not known, or no name. `adapter_id`: what it led to.
    `omitted`: how many others of its key and code in the same minute have no row.
    """

    __tablename__ = "failed_requests"
    __table_args__ = (
        Index("ix_failed_requests_request_id", "tenant_id", "request_id"),
        Index("ix_failed_requests_at", "at"),
    )

    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    id: Mapped[UUID] = mapped_column(primary_key=True)
    at: Mapped[datetime]
    is_refused: Mapped[bool]
    request_id: Mapped[str]
    key_id: Mapped[str]
    adapter_id: Mapped[UUID | None]
    model: Mapped[str | None]
    code: Mapped[str]
    status: Mapped[int]
    message: Mapped[str]
    omitted: Mapped[int]


class UsageTotal(Base):
    """The sum of the usage records of one level's subject in one period, from which counters are rebuilt.

    `amount_nano` sums each record's amount rounded up to nano-units, as the counters do.
    """

    __tablename__ = "usage_totals"
    __table_args__ = (
        CheckConstraint(one_of("level", LEVELS), name="level"),
        CheckConstraint(f"period ~ '{PERIOD}'", name="period"),
    )

    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    level: Mapped[str] = mapped_column(primary_key=True)
    subject_id: Mapped[UUID] = mapped_column(primary_key=True)
    period: Mapped[str] = mapped_column(primary_key=True)
    requests: Mapped[BigInt]
    tokens: Mapped[BigInt]
    amount_nano: Mapped[BigInt]


METERS = ("prompt", "cached_prompt", "completion", "reasoning")
"""The classes of tokens, each with a meter of its own."""


class MeterExport(Base):
    """One meter event: what a tenant used of one class of tokens in one UTC hour and was not exported before.

    Rows that reach a closed hour late become another event with the next `sequence`. `value` may be negative, after a
    correction.
    """

    __tablename__ = "meter_exports"
    __table_args__ = (
        UniqueConstraint("tenant_id", "hour", "meter", "sequence"),
        Index("ix_meter_exports_unsent", "id", postgresql_where=text("sent_at IS NULL")),
        Index("ix_meter_exports_hour", "hour"),
        CheckConstraint(one_of("meter", METERS), name="meter"),
        CheckConstraint("value <> 0 AND sequence >= 1", name="value"),
    )

    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    hour: Mapped[datetime]
    meter: Mapped[str]
    sequence: Mapped[int]
    value: Mapped[BigInt]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    sent_at: Mapped[datetime | None]
