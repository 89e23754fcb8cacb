"""Temperature scaling of a decision's probabilities (Guo et al., 2017, arXiv:1706.04599), and how good probabilities are.

Invariant: a temperature changes the order of no options, only how sure the first one is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

MIN_TEMPERATURE: Final = 0.05
MAX_TEMPERATURE: Final = 20.0
BINS: Final = 10
_STEPS: Final = 40
"""Of a bisection."""
_SIGNIFICANT: Final = 3.84
"""Exceeded by chance alone in 5 of 100 cases (score test, one degree of freedom)."""
_LEAST: Final = 1e-300


@dataclass(frozen=True, slots=True)
class Labelled:
    """The probabilities of an example's options, and which of them is right."""

    probabilities: Sequence[float]
    right: int


class Quality(BaseModel):
    """`accuracy`: share of examples whose likeliest option is right. `brier`: mean squared distance from the truth, over all options.
    `ece`: expected calibration error of the likeliest option, over `BINS` bins of equal width.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    accuracy: float = Field(ge=0, le=1)
    brier: float = Field(ge=0, le=2)
    ece: float = Field(ge=0, le=1)


def softmax(logprobs: Sequence[float], temperature: float) -> list[float]:
    """Return the distribution of these log-probabilities at a temperature; below 1 it is sharper."""
    most = max(logprobs)
    weights = [math.exp((each - most) / temperature) for each in logprobs]
    total = math.fsum(weights)
    return [each / total for each in weights]


def tempered(probabilities: Sequence[float], temperature: float) -> list[float]:
    """Return a distribution at a temperature."""
    return softmax(_logs(probabilities), temperature)


def best_temperature(examples: Sequence[Labelled]) -> float:
    """Return the temperature of the maximum likelihood, within bounds; 1 where the examples do not tell it from 1.

    The likelihood is concave in the inverse temperature.
    """
    slope, information = _slope(examples, 1.0)
    if slope**2 <= _SIGNIFICANT * information:
        return 1.0
    low, high = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE
    for _ in range(_STEPS):
        inverse = (low + high) / 2
        if _slope(examples, inverse)[0] > 0:
            low = inverse
        else:
            high = inverse
    return 2 / (low + high)


def quality_of(examples: Sequence[Labelled]) -> Quality:
    """Measure the probabilities of at least one example."""
    count, hits, brier = len(examples), 0, 0.0
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for each in examples:
        top = max(each.probabilities)
        is_right = each.probabilities[each.right] == top
        hits += is_right
        brier += sum((p - (i == each.right)) ** 2 for i, p in enumerate(each.probabilities))
        bins[min(int(top * BINS), BINS - 1)].append((top, is_right))
    gaps = [abs(sum(top for top, _ in each) - sum(right for _, right in each)) for each in bins]
    return Quality(accuracy=hits / count, brier=brier / count, ece=sum(gaps) / count)


def _slope(examples: Sequence[Labelled], inverse: float) -> tuple[float, float]:
    """Return the derivative of the log-likelihood of the right options by the inverse temperature, and its Fisher information."""
    slope = information = 0.0
    for each in examples:
        logs = _logs(each.probabilities)
        shares = softmax(logs, 1 / inverse)
        expected = math.fsum(map(mul, shares, logs))
        slope += logs[each.right] - expected
        information += math.fsum(
            share * (log - expected) ** 2 for share, log in zip(shares, logs, strict=True)
        )
    return slope, information


def _logs(probabilities: Sequence[float]) -> list[float]:
    return [math.log(max(each, _LEAST)) for each in probabilities]
