"""Simulated releases: requests drawn by weight and judged as a guard judges them, at every look."""

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from loraplex.tenants.canaries.records import GuardCounts, evidence_of

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
    more = {"max_unsatisfied": 0.05, "max_ttft_ratio": 1.0} if others else {}
    bounds = {"max_unsatisfied": None, "max_ttft_ratio": None, "canary_weight": WEIGHT, **more}
    guard = cast("Any", SimpleNamespace(max_failure_ratio=ratio, **bounds))
    counts = GuardCounts()
    for _ in range(looks):
        of_canary = int(random.binomial(requests, WEIGHT / 100))
        failed = int(random.binomial(of_canary, failing[1]))
        counts += GuardCounts(
            canary_requests=of_canary,
            canary_failed=failed,
            canary_answered=of_canary - failed,
            canary_unsatisfied=int(random.binomial(of_canary - failed, 0.05)),
            baseline_requests=requests - of_canary,
            baseline_failed=int(random.binomial(requests - of_canary, failing[0])),
            ttft_pairs=of_canary,
            ttft_slower=int(random.binomial(of_canary, 0.5)),
        )
        near = max(evidence_of(guard, counts).values())
        if counts.canary_requests >= MIN_REQUESTS and near >= 1:
            return counts.canary_requests
    return math.inf
