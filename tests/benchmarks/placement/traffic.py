"""Traffic of a simulated fleet: adapters by Zipf, tenants of several adapters, prefixes, bursts, and a day's course of the rate.

Invariant: everything is a function of the shape with its seed, so that each policy gets the same requests.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from loraplex.engine.messages import AdapterKey

RANKS: Final = (4, 8, 16, 32)
RANK_SHARES: Final = (0.2, 0.3, 0.4, 0.1)
BYTES_PER_RANK: Final = 42_000_000 * 2 // 16
"""An 8B model's seven projections in 16 bits: 84 MB at rank 16."""

ADAPTERS_PER_TENANT: Final = 8
PREFIXES_PER_ADAPTER: Final = 3
BURST_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    """A fleet and its traffic. `load`: mean share of the rows in use, which a day's course moves by `swing` of it, up and down.

    The day takes the whole run. `burst_share`: of all requests, those that come in bursts of some `burst_size` for one adapter,
    of any popularity, within seconds. `routers` share the requests. Bytes: of adapters, in the memories of one replica.
    """

    replicas: int = 1000
    adapters: int = 100_000
    requests: int = 120_000
    rows: int = 32
    zipf: float = 1.1
    load: float = 0.75
    swing: float = 0.25
    burst_share: float = 0.1
    burst_size: int = 40
    routers: int = 4
    device_bytes: int = 8 * 10**9
    host_bytes: int = 32 * 10**9
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in the order of their times, one entry for each in an array. `keys`, `sizes`: one for each adapter.

    `last_used`: adapters in the order of their last use before the first request, the newest first.
    """

    times: NDArray[np.float64]
    adapters: NDArray[np.int64]
    prefixes: NDArray[np.int64]
    routers: NDArray[np.int64]
    prefix_tokens: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    keys: list[AdapterKey]
    sizes: NDArray[np.int64]
    last_used: NDArray[np.int64]


def make_traffic(shape: FleetShape, rate: float) -> Traffic:
    """Draw the requests, `rate` per second in the mean."""
    random, popularity = np.random.default_rng(shape.seed), popularity_of(shape)
    times, adapters = _arrivals(shape, rate, popularity, random)
    count = len(times)
    ranks = random.choice(RANKS, shape.adapters, p=RANK_SHARES)
    prefix_lengths = random.integers(200, 2000, shape.adapters * PREFIXES_PER_ADAPTER)
    prefixes = adapters * PREFIXES_PER_ADAPTER + random.integers(0, PREFIXES_PER_ADAPTER, count)
    prefix_tokens = prefix_lengths[prefixes]
    return Traffic(
        times=times,
        adapters=adapters,
        prefixes=prefixes,
        routers=random.integers(0, shape.routers, count),
        prefix_tokens=prefix_tokens,
        prompt_tokens=prefix_tokens + random.integers(50, 500, count),
        output_tokens=np.clip(random.lognormal(5.0, 0.8, count), 8, 1500).astype(np.int64),
        keys=[_key(number) for number in random.permutation(shape.adapters)],
        sizes=ranks * BYTES_PER_RANK,
        last_used=np.argsort(-random.exponential(1.0, shape.adapters) / popularity),
    )


def popularity_of(shape: FleetShape) -> NDArray[np.float64]:
    """The share of each adapter in the requests that come in no burst."""
    weights = np.arange(1, shape.adapters + 1, dtype=np.float64) ** -shape.zipf
    return np.asarray(weights / weights.sum())


def _arrivals(
    shape: FleetShape, rate: float, popularity: NDArray[np.float64], random: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Times along a sine, and the adapters: most by popularity, the others by burst."""
    seconds = shape.requests / rate
    bursting = int(shape.requests * shape.burst_share)
    bursts = max(bursting // shape.burst_size, 1)
    begun = _times(bursts, seconds, shape.swing, random)
    of_burst = random.integers(0, bursts, bursting)
    times = np.concatenate(
        (
            _times(shape.requests - bursting, seconds, shape.swing, random),
            begun[of_burst] + random.exponential(BURST_S, bursting),
        )
    )
    adapters = np.concatenate(
        (
            random.choice(shape.adapters, shape.requests - bursting, p=popularity),
            random.integers(0, shape.adapters, bursts)[of_burst],
        )
    )
    order = np.argsort(times)
    return times[order], adapters[order]


def _times(count: int, seconds: float, swing: float, random: np.random.Generator) -> NDArray[np.float64]:
    """Arrivals of a Poisson process whose rate follows one sine, least at both ends."""
    grid = np.linspace(0.0, 1.0, 4096)
    course = grid - swing * np.sin(2 * np.pi * grid) / (2 * np.pi)
    return seconds * np.interp(random.random(count), course, grid)


def _key(number: int) -> AdapterKey:
    tenant = int(number) // ADAPTERS_PER_TENANT
    return tenant.to_bytes(32, "big"), f"{number:064x}"
