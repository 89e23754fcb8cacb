"""Corrections of the usage ledger: a row that names what it reverses, with its tokens and its amount negated.

Invariant: a row is reversed at most once, because the id of its correction follows from its own; rollups and totals follow in the
same transaction.
"""

from typing import Any, Final
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.database import writing
from loraplex.tenants.errors import AlreadyCorrected, InvalidField, RequestNotFound
from loraplex.tenants.ids import uuid7_derived
from loraplex.tenants.ledger.statements import SETTLE
from loraplex.tenants.ledger.usage_ledger import Row, to_json
from loraplex.tenants.models import UsageRecord

MAX_REASON: Final = 500
CORRECTION: Final = "correction"
COPIED: Final = (
    *("tenant_id", "client_request_id", "api_key_id", "adapter_id", "adapter_version", "digest", "outcome"),
    *("price_version_id", "currency", "day", "month", "admitted_at", "system_fingerprint", "session"),
    *("alias", "unsatisfied"),
)
NEGATED: Final = ("uncached_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "amount_pico")


class UsageCorrections:
    """The corrections of one session of an operator."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def reverse(self, record_id: UUID, reason: str) -> UsageRecord:
        """Write the correction that takes back all tokens and the amount of a usage record; return it.

        It belongs to the period and the month of that record. Its request still counts as a request. Raises
        `RequestNotFound`, `AlreadyCorrected`, and `InvalidField` unless the reason has 1 to `MAX_REASON` characters.
        """
        if not 1 <= len(reason.strip()) <= MAX_REASON:
            raise InvalidField("reason", f"reason must have 1 to {MAX_REASON} characters")
        reversed_record = await self._record(record_id)
        if reversed_record is None or reversed_record.kind == CORRECTION:
            raise RequestNotFound(f"the ledger has no request {record_id}")
        row = correction_row(reversed_record, reason.strip())
        async with writing(self._session):
            connection = await self._session.connection()
            outcome = (await connection.exec_driver_sql(SETTLE, (to_json([row]),))).one()
        if not outcome.written:
            raise AlreadyCorrected(f"the request {record_id} has been corrected already")
        return (await self._session.scalars(select(UsageRecord).where(UsageRecord.id == row["id"]))).one()

    async def _record(self, record_id: UUID) -> UsageRecord | None:
        return await self._session.get(UsageRecord, record_id)


def correction_row(reversed_record: UsageRecord, reason: str) -> Row:
    """The correction as `SETTLE` reads it."""
    copied: dict[str, Any] = {name: getattr(reversed_record, name) for name in COPIED}
    negated = {name: -getattr(reversed_record, name) for name in NEGATED}
    return {
        "id": uuid7_derived(reversed_record.id, CORRECTION),
        "kind": CORRECTION,
        "reverses_id": reversed_record.id,
        "reason": reason,
        **copied,
        **negated,
    }
