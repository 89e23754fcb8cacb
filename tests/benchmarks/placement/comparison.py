"""Compares the policies on one fleet and the same traffic: hits, waits and moved bytes.

Invariant: each policy begins with memories that it would have filled itself, so that no first request of an adapter counts as
a miss that a running fleet would not have.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Final

import numpy as np
from tests.benchmarks.placement.fleet import (
    PREFILL_TOKENS_PER_S,
    TOKEN_ROW_S,
    TOKEN_S,
    Outcome,
    Policy,
    Simulation,
)
from tests.benchmarks.placement.policies import ConsistentHash, KnownLoads, LeastLoaded, Memories, Product
from tests.benchmarks.placement.traffic import FleetShape, Traffic, make_traffic, popularity_of

from loraplex.platform.bench.latency_metrics import percentile
from loraplex.platform.bench.report import Case, Ratio, Report

MIN_HIT_RATE: Final = 0.9
MAX_QUEUE: Final = 1.2
MEAN_OUTPUT, MEAN_PROMPT = 203.0, 1375.0
USES_BEFORE: Final = 2000
COLUMNS: Final = ("hit_rate", "queue_p99_ms", "read_gb", "copied_gb", "decision_us")

PRODUCT, LEAST_LOADED = "product", "least loaded"
POLICIES: Final[dict[str, Callable[[FleetShape, Memories, int], Policy]]] = {
    PRODUCT: Product,
    LEAST_LOADED: lambda shape, _, seed: LeastLoaded(shape, seed),
    "random": lambda shape, _, seed: KnownLoads(shape, seed),
    "consistent hash": lambda shape, _, seed: ConsistentHash(shape, seed, bounded=False),
    "consistent hash, bounded": lambda shape, _, seed: ConsistentHash(shape, seed, bounded=True),
}
OF_ANY_ADAPTER: Final = (LEAST_LOADED, "random")


def compare_placement(shape: FleetShape, peak: float, progress: Callable[[str], None]) -> Report:
    """Run every policy at the load of `shape`, and the first two at the load `peak`. Takes minutes at the default size."""
    report = Report("placement", COLUMNS)
    for at, names in ((shape, tuple(POLICIES)), (replace(shape, load=peak), (PRODUCT, LEAST_LOADED))):
        traffic = make_traffic(at, _rate(at))
        outcomes = {}
        for name in names:
            progress(f"{name}, load {at.load:g}")
            outcomes[name] = run_policy(at, traffic, name)
            report.cases.append(Case(f"{name}, load {at.load:g}", asdict(at), _figure(outcomes[name])))
        required = at is shape
        report.ratios += _ratios(f"load {at.load:g}", outcomes, required=required)
    return report


def run_policy(shape: FleetShape, traffic: Traffic, name: str) -> Outcome:
    """Fill the replicas' memories as the policy would have, then serve the traffic."""
    memories = Memories(traffic)
    routers = [POLICIES[name](shape, memories, shape.seed + number) for number in range(shape.routers)]
    simulation = Simulation(shape, traffic, routers)
    simulation.warm(_of_any(shape) if name in OF_ANY_ADAPTER else _of_homes(routers[0], simulation, traffic))
    return simulation.run()


def _of_homes(router: Policy, simulation: Simulation, traffic: Traffic) -> Iterable[tuple[int, int]]:
    """Each adapter on the replica that an idle fleet's router chooses, the one that was used longest ago first."""
    for replica in simulation.replicas:
        router.report(replica)
    return ((router.choose(adapter, 0, 0.0), adapter) for adapter in traffic.last_used[::-1].tolist())


def _of_any(shape: FleetShape) -> Iterable[tuple[int, int]]:
    """On each replica the adapters of its last uses, by popularity."""
    random, popularity = np.random.default_rng(shape.seed), popularity_of(shape)
    for replica in range(shape.replicas):
        uses = random.choice(shape.adapters, USES_BEFORE, p=popularity).tolist()
        yield from ((replica, adapter) for adapter in reversed(list(dict.fromkeys(uses))))


def _rate(shape: FleetShape) -> float:
    """Requests per second that use `load` of the rows in the mean."""
    rows = shape.rows * shape.load
    service_s = MEAN_OUTPUT * (TOKEN_S + TOKEN_ROW_S * rows) + MEAN_PROMPT / PREFILL_TOKENS_PER_S
    return shape.replicas * rows / service_s


def _figure(outcome: Outcome) -> dict[str, float]:
    waits, count = outcome.waits, outcome.requests
    return {
        "requests": count,
        "hit_rate": outcome.device_hits / count,
        "host_or_device_rate": (outcome.device_hits + outcome.host_hits) / count,
        "prefix_hit_rate": outcome.prefix_hits / count,
        "queue_p50_ms": percentile(waits, 50) * 1000,
        "queue_p99_ms": percentile(waits, 99) * 1000,
        "queue_mean_ms": sum(waits) / count * 1000,
        "read_gb": outcome.read_bytes / 1e9,
        "copied_gb": outcome.copied_bytes / 1e9,
        "decision_us": outcome.decision_s / outcome.decisions * 1e6,
    }


def _ratios(load: str, outcomes: dict[str, Outcome], *, required: bool) -> list[Ratio]:
    product, least = _figure(outcomes[PRODUCT]), _figure(outcomes[LEAST_LOADED])
    return [
        Ratio(f"hit rate, {load}", product["hit_rate"], MIN_HIT_RATE if required else None),
        Ratio(
            f"p99 queue: product / least loaded, {load}",
            product["queue_p99_ms"] / max(least["queue_p99_ms"], 1e-3),
            MAX_QUEUE if required else None,
            "at most",
        ),
    ]
