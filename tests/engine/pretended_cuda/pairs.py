"""Settings that hold every pair of values of two factors at least once, where both can be had together.

Source: D. Cohen et al., "The AETG system: an approach to testing based on combinatorial design" (1997).
"""

from collections.abc import Iterator
from dataclasses import astuple
from itertools import combinations, product

from tests.engine.pretended_cuda.engine_runs import ADAPTERS, EVENTS, SAMPLINGS, STEPS, WEIGHTS, Settings

Pair = tuple[tuple[int, str], tuple[int, str]]


def possible() -> Iterator[Settings]:
    """Every combination: no adapter is evicted without others, and none is quarantined where there are none, or where 8-bit
    pages refuse its values.
    """
    for values in product(WEIGHTS, ADAPTERS, STEPS, SAMPLINGS, EVENTS):
        settings = Settings(*values)
        if settings.event == "eviction" and settings.num_adapters < 2:
            continue
        if settings.event == "quarantine" and settings.adapters in ("0", "10 int8"):
            continue
        yield settings


def pairs_of(settings: Settings) -> set[Pair]:
    """The pairs of values that these settings hold."""
    return set(combinations(enumerate(astuple(settings)), 2))


def every_pair() -> list[Settings]:
    """Few settings with all pairs: each next one holds the most that are missing."""
    left = {pair for settings in possible() for pair in pairs_of(settings)}
    candidates, chosen = list(possible()), []
    while left:
        best = max(candidates, key=lambda settings: len(pairs_of(settings) & left))
        left -= pairs_of(best)
        chosen.append(best)
    return chosen
