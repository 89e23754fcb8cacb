"""Simulated releases: requests drawn by weight and judged as a guard judges them, at every look."""

import math
from collections import Counter
from datetime import UTC, datetime

import numpy as np

from loraplex.tenants.canaries.records import GuardCounts, GuardDocument

MIN_REQUESTS = 100
WEIGHT = 5


def release(
    random: np.random.Generator,
    *,
    failing: tuple[float, float],
    ratio: float,
    others: bool = False,
    looks: int = 60,
    requests: int = 200,
) -> float:
    """The canary's requests when its alias goes back; infinite if it never does.

    `failing`: the share of the baseline's requests that fail and of the canary's. `others`: the two other bounds hold as well, and
    are just kept. `requests`: of both versions between two looks.
    """
    guard = GuardDocument(
        max_failure_ratio=ratio,
        max_unsatisfied=0.05 if others else None,
        max_ttft_ratio=1.0 if others else None,
        min_requests=MIN_REQUESTS,
        baseline=1,
        canary=2,
        canary_weight=WEIGHT,
        counts=GuardCounts(),
        began_at=datetime.now(UTC),
        counted_until=datetime.now(UTC),
    )
    counts = Counter[str]()
    for _ in range(looks):
        of_canary = int(random.binomial(requests, WEIGHT / 100))
        failed = int(random.binomial(of_canary, failing[1]))
        more = Counter(
            canary_requests=of_canary,
            canary_failed=failed,
            canary_answered=of_canary - failed,
            canary_unsatisfied=int(random.binomial(of_canary - failed, 0.05)),
            baseline_requests=requests - of_canary,
            baseline_failed=int(random.binomial(requests - of_canary, failing[0])),
            ttft_pairs=of_canary,
            ttft_slower=int(random.binomial(of_canary, 0.5)),
        )
        counts += more
        guard = guard.model_copy(update={"counts": GuardCounts(**counts)})
        if guard.broken is not None:
            return guard.counts.canary_requests
    return math.inf
