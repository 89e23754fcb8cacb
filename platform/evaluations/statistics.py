"""Figures of pass rates: Wilson's interval (1927) of one, and McNemar's exact test (1947) of two on the same cases."""

import math
from statistics import NormalDist
from typing import Final

CONFIDENCE: Final = 0.95
_Z: Final = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def wilson_interval(passed: int, total: int) -> tuple[float, float]:
    """Return the interval of a pass rate at `CONFIDENCE`. `total` is at least 1."""
    rate, z2 = passed / total, _Z**2
    middle = (rate + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z / (1 + z2 / total) * math.sqrt(rate * (1 - rate) / total + z2 / (4 * total**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def paired_p_value(worse: int, better: int) -> float:
    """Return the two-sided probability of so uneven a split of the cases on which two models differ, if they are equally good."""
    differing, fewer = worse + better, min(worse, better)
    logs = (
        math.lgamma(differing + 1) - math.lgamma(k + 1) - math.lgamma(differing - k + 1)
        for k in range(fewer + 1)
    )
    return min(1.0, 2 * sum(math.exp(each - differing * math.log(2)) for each in logs))
