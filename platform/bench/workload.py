"""Prompts, adapter choice and arrival times of a load.

Invariant: everything is a function of its seed, so that two engines get the same requests.
"""

import random
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

Distribution: TypeAlias = Literal["uniform", "zipf", "distinct"]

_TEXT: Final = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government number
night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law
car city community name president team minute idea body information back parent face others
level office door health person art war history party result change morning reason research girl
guy moment air teacher force education river stone winter garden letter music
"""
WORDS: Final = _TEXT.split()


def vocabulary_text(count: int = 1500, seed: int = 0) -> str:
    """Ordinary English words; their token ids are the pool from which prompts are drawn."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def draw_prompts(
    pool: Sequence[int], count: int, length: int, seed: int, prefix: Sequence[int] = ()
) -> list[list[int]]:
    """`count` prompts of `length` token ids; each begins with `prefix`, the rest is drawn from `pool`."""
    generator = random.Random(seed)
    rest = max(length - len(prefix), 0)
    return [[*prefix[:length], *generator.choices(pool, k=rest)] for _ in range(count)]


def pick_adapters(
    adapters: int, count: int, distribution: Distribution, exponent: float, seed: int
) -> list[int]:
    """Draw the adapter index of each of `count` requests. `zipf`: index i with weight (i + 1) ** -exponent.

    `distinct` is round-robin, so that as many different adapters as possible are in flight.
    """
    if distribution == "distinct":
        return [index % adapters for index in range(count)]
    weights = zipf_weights(adapters, exponent if distribution == "zipf" else 0.0)
    return random.Random(seed).choices(range(adapters), weights=weights, k=count)


def zipf_weights(count: int, exponent: float) -> list[float]:
    """Weights that are not normalised; exponent 0 is uniform."""
    return [float(rank) ** -exponent for rank in range(1, count + 1)]


def arrival_offsets(count: int, rate: float | None, seed: int) -> list[float]:
    """Seconds after the start: a Poisson process of `rate` requests per second, or all at once without a rate."""
    if rate is None:
        return [0.0] * count
    generator = random.Random(seed)
    offsets, now = [], 0.0
    for _ in range(count):
        offsets.append(now)
        now += generator.expovariate(rate)
    return offsets
