"""Suites, evaluations and gates, as the API returns them."""

from typing import Any, Final, NamedTuple
from uuid import UUID

from loraplex.tenants.records import Record, UtcTime

OPEN_STATES: Final = ("queued", "running")
STATES: Final = (*OPEN_STATES, "completed", "failed", "cancelled")
MAX_SUITES: Final = 100
MAX_SUITE_BYTES: Final = 256 << 20
"""Of all suites of a tenant together."""
MAX_OPEN: Final = 10
"""Evaluations of a tenant that are queued or running."""
MAX_SEED: Final = 2**63 - 1


class SuiteDocument(Record):
    """`sha256`: of the file. `base_digest`: the base model that the cases are for; null for any. `shared`: the installation's."""

    name: str
    sha256: str
    cases: int
    size_bytes: int
    base_digest: str | None
    shared: bool
    created_by: str
    created_at: UtcTime


class FoundSuite(NamedTuple):
    """A suite that an evaluation or a gate names; `id` None: the built-in one."""

    name: str
    sha256: str
    cases: int
    id: UUID | None = None
    base_digest: str | None = None


class EvaluationDocument(Record):
    """`profile`: the version's when it began. `total`: answers to come, `done`: those that came, of version and baseline together. `latency`: seconds of an answer.

    `reason`: why it failed. `pass_rate`, `report_sha256` and what else is of the report are null until it is `completed`.
    """

    id: UUID
    adapter: str
    version: int
    suite: str
    suite_sha256: str
    baseline: str | None
    profile: dict[str, Any]
    seed: int
    state: str
    reason: str | None
    total: int
    done: int
    pass_rate: float | None
    baseline_pass_rate: float | None
    system_fingerprint: str | None
    latency: dict[str, Any] | None
    report_sha256: str | None
    created_by: str
    created_at: UtcTime
    ended_at: UtcTime | None

    @property
    def cases(self) -> int:
        """Cases of the suite."""
        return self.total // (1 if self.baseline is None else 2)

    @property
    def regression(self) -> float:
        """By how much the pass rate is below the baseline's; 0 without one."""
        if self.pass_rate is None or self.baseline_pass_rate is None:
            return 0.0
        return round(self.baseline_pass_rate - self.pass_rate, 6)


class GateDocument(Record):
    """`max_regression`: by how much the pass rate may be below that of the alias's version; null: by any."""

    suite: str
    suite_sha256: str
    min_pass: float
    max_regression: float | None
    changed_by: str
    changed_at: UtcTime
