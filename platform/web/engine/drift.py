"""Counters against the usage ledger, as this gateway compared them. Invariant: reading it compares nothing and waits for no store
but the names of tenants.
"""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.tenants import names_of
from loraplex.tenants.admission.drift_log import DriftFinding, DriftLog
from loraplex.tenants.billing.pricing import PICO_PER_NANO


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftRow:
    """The difference of a tenant's counters in one day or month: what the ledger has more, negative where it has less.

    `corrected_at` None: it is compared once more, or waits for updates of requests that have ended.
    """

    tenant_id: UUID
    tenant: str
    period: str
    tokens: int
    amount_pico: int
    since: datetime
    corrected_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftReport:
    """All differences that this gateway found lately, the newest first; `comparisons` since its start."""

    rows: tuple[DriftRow, ...]
    comparisons: int
    compared_at: datetime | None

    @property
    def open(self) -> int:
        """The number of tenants whose counters differ now."""
        return len({row.tenant_id for row in self.rows if row.corrected_at is None})


async def drift(session: AsyncSession, log: DriftLog) -> DriftReport:
    """Read what `log` has found, with the names of tenants, as an operator."""
    findings = log.findings
    names = await names_of(session, {each.tenant_id for each in findings})
    rows = [row for each in findings for row in _rows(each, names.get(each.tenant_id, str(each.tenant_id)))]
    return DriftReport(rows=tuple(rows), comparisons=log.comparisons, compared_at=log.compared_at)


def _rows(finding: DriftFinding, tenant: str) -> list[DriftRow]:
    return [
        DriftRow(
            tenant_id=finding.tenant_id,
            tenant=tenant,
            period=use.period[2:],
            tokens=use.tokens,
            amount_pico=use.amount_nano * PICO_PER_NANO,
            since=finding.since,
            corrected_at=finding.corrected_at,
        )
        for use in finding.drift.behind
        if use.tokens or use.amount_nano
    ]
