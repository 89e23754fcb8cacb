"""A guard: its bounds, what it has counted, and how near it is to going back."""

import math
from typing import Final

from pydantic import ConfigDict, Field, computed_field

from loraplex.tenants.canaries.sequential_test import log_e_value
from loraplex.tenants.records import Record, UtcTime

ALPHA: Final = 0.01
"""The most probable it is that a guard ever goes back from a canary that keeps all its bounds."""
BOUNDS: Final = ("max_failure_ratio", "max_unsatisfied", "max_ttft_ratio")
MAX_RATIO: Final = 1000.0


class GuardBounds(Record):
    """What a canary must keep; at least one of the first three. `baseline`: the version to go back to."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_failure_ratio: float | None = Field(default=None, ge=1, le=MAX_RATIO)
    max_unsatisfied: float | None = Field(default=None, ge=0.001, le=0.99)
    max_ttft_ratio: float | None = Field(default=None, ge=1, le=MAX_RATIO)
    min_requests: int = Field(default=100, ge=20, le=1_000_000)
    baseline: int | None = Field(default=None, ge=1, le=2**31 - 1)


class GuardCounts(Record):
    """Requests that ended, aborted and revoked ones apart; `*_answered`: those of them that did not fail, or missed their schema.

    `ttft_pairs`: a request of the canary and the baseline's just before it, both with a first token; `ttft_slower`: those in which
    the canary took more than `max_ttft_ratio` times as long.
    """

    canary_requests: int = 0
    canary_failed: int = 0
    canary_answered: int = 0
    canary_unsatisfied: int = 0
    baseline_requests: int = 0
    baseline_failed: int = 0
    baseline_unsatisfied: int = 0
    ttft_pairs: int = 0
    ttft_slower: int = 0


class GuardDocument(GuardBounds):
    """The guard of an alias's present split. `counts`: of what was settled until `counted_until`."""

    model_config = ConfigDict(strict=False)

    baseline: int
    canary: int
    canary_weight: int
    began_at: UtcTime
    counted_until: UtcTime
    counts: GuardCounts

    @property
    def bounds(self) -> GuardBounds:
        """What the author of the guard has set, with the baseline that follows."""
        return GuardBounds(**self.model_dump(include={*GuardBounds.model_fields}))

    @property
    def broken(self) -> str | None:
        """The bound that the canary certainly breaks, once it has `min_requests`; None while there is none."""
        if self.counts.canary_requests < self.min_requests:
            return None
        return next((name for name, near in self.evidence.items() if near >= 1), None)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def evidence(self) -> dict[str, float]:
        """For each bound how far the e-value of its breach is, on a logarithmic scale: 0 for none, 1 where the alias goes back.

        The error `ALPHA` is shared by the bounds, so that it holds for all of them together.
        """
        counts, tests = self.counts, dict[str, tuple[int, int, float]]()
        if self.max_failure_ratio is not None:
            # Versions are drawn by weight: a failure is the canary's with at most this probability while it keeps the bound.
            odds = self.max_failure_ratio * self.canary_weight / (100 - self.canary_weight)
            failed = counts.canary_failed + counts.baseline_failed
            tests["max_failure_ratio"] = (counts.canary_failed, failed, odds / (1 + odds))
        if self.max_unsatisfied is not None:
            unsatisfied = counts.canary_unsatisfied
            tests["max_unsatisfied"] = (unsatisfied, counts.canary_answered, self.max_unsatisfied)
        if self.max_ttft_ratio is not None:
            # Of two requests drawn alike, either is the slower one with the same probability.
            tests["max_ttft_ratio"] = (counts.ttft_slower, counts.ttft_pairs, 0.5)
        enough = math.log(len(tests) / ALPHA)
        return {name: round(max(0.0, log_e_value(*test) / enough), 4) for name, test in tests.items()}
