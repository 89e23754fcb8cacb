"""An anytime-valid test of one share: an e-process, the mixture of likelihood ratios over greater shares.

Invariant: while each trial is a hit with at most the probability `bound`, whatever came before, the e-value ever exceeds 1/alpha
with at most the probability alpha, however often it is looked at (Ville, Étude critique de la notion de collectif, 1939; the mixture:
Robbins, Ann. Math. Statist. 41, 1970; e-processes: Ramdas, Grünwald, Vovk, Shafer, Statist. Sci. 38, 2023).
"""

import math
from typing import Final

ALTERNATIVES: Final = tuple(2 ** (step / 2) for step in range(1, 17))
"""By how much the odds of a hit exceed those of the bound, equally weighted: 1.4 to 256 times."""


def log_e_value(hits: int, trials: int, bound: float) -> float:
    """Return the logarithm of the evidence that a trial is a hit more often than `bound`, which lies between 0 and 1."""
    odds = bound / (1 - bound)
    logs = []
    for factor in ALTERNATIVES:
        share = factor * odds / (1 + factor * odds)
        missed = math.log1p(-share) - math.log1p(-bound)
        logs.append(hits * math.log(share / bound) + (trials - hits) * missed)
    most = max(logs)
    return most + math.log(sum(math.exp(each - most) for each in logs) / len(logs))
