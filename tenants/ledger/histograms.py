"""Buckets of the latency histograms in `request_rollups`. Invariant: the bounds never change, since stored counts follow them."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final

BUCKETS: Final = 16
TTFT_BOUNDS_MS: Final = (10, 25, 50, 100, 150, 250, 350, 500, 750, 1000, 1500, 2500, 5000, 10_000, 30_000)
GAP_BOUNDS_MS: Final = (1, 2, 5, 10, 15, 20, 30, 40, 50, 75, 100, 200, 500, 1000, 5000)
"""The largest milliseconds of each bucket but the last, which has no bound."""
EMPTY: Final = (0,) * BUCKETS


def bucket_of(bounds: tuple[int, ...], milliseconds: float) -> int:
    """The index of the bucket, from 0."""
    return bisect_left(bounds, milliseconds)


def counted(bounds: tuple[int, ...], milliseconds: Iterable[float]) -> tuple[int, ...]:
    """How many of the times are in each bucket."""
    counts = [0] * BUCKETS
    for each in milliseconds:
        counts[bucket_of(bounds, each)] += 1
    return tuple(counts)


def added(histograms: Iterable[Sequence[int]]) -> list[int]:
    """The counts of several histograms, bucket by bucket."""
    return [sum(counts) for counts in zip(EMPTY, *histograms, strict=True)]


def quantile(bounds: tuple[int, ...], counts: Sequence[int], percent: int) -> int | None:
    """The milliseconds that so many per cent of the counted times do not exceed, interpolated within a bucket; None without
    times. Times beyond the last bound count as that bound.
    """
    rank, before = percent * sum(counts), 0
    for lower, upper, count in zip((0, *bounds), (*bounds, bounds[-1]), counts, strict=True):
        if count and rank <= before + 100 * count:
            return lower + (2 * (upper - lower) * (rank - before) + 100 * count) // (200 * count)
        before += 100 * count
    return None
