"""What the reconciliation of one gateway found, for operators. Invariant: it keeps the newest differences only, `MAX_KEPT` at most."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from loraplex.tenants.admission.counter_drift import CounterDrift

MAX_KEPT: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftFinding:
    """Counters of a tenant that differ from the ledger. `corrected_at` None: they are compared once more, or wait for updates
    of requests that have ended.
    """

    tenant_id: UUID
    drift: CounterDrift
    since: datetime
    corrected_at: datetime | None = None


@dataclass(slots=True)
class DriftLog:
    """The findings of one gateway. `comparisons` counts those since its start, `compared_at` is when the last one ended."""

    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    comparisons: int = 0
    compared_at: datetime | None = None
    _found: dict[UUID, DriftFinding] = field(default_factory=dict)

    @property
    def findings(self) -> tuple[DriftFinding, ...]:
        """The findings, the newest first."""
        return tuple(reversed(self._found.values()))

    def compared(self, tenant_id: UUID, drift: CounterDrift | None) -> None:
        """Note a comparison. None: the counters agree with the ledger, so an open finding ends."""
        self.comparisons += 1
        self.compared_at = self.now()
        known = self._found.get(tenant_id)
        is_open = known is not None and known.corrected_at is None
        if drift is None:
            if is_open:
                del self._found[tenant_id]
            return
        since = known.since if known is not None and is_open else self.compared_at
        self._keep(DriftFinding(tenant_id=tenant_id, drift=drift, since=since))

    def corrected(self, tenant_id: UUID) -> None:
        """Note that the counters of a finding were rebuilt."""
        self._keep(replace(self._found[tenant_id], corrected_at=self.now()))

    def _keep(self, finding: DriftFinding) -> None:
        self._found.pop(finding.tenant_id, None)
        self._found[finding.tenant_id] = finding
        if len(self._found) > MAX_KEPT:
            del self._found[next(iter(self._found))]
