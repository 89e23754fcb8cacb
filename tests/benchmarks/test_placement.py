"""The simulated fleet: each request is served once, time and memory add up, and policies differ as they must."""

import pytest
from tests.benchmarks.placement.comparison import PRODUCT, compare_placement, run_policy
from tests.benchmarks.placement.fleet import Replica, Simulation
from tests.benchmarks.placement.policies import KnownLoads
from tests.benchmarks.placement.traffic import FleetShape, Traffic, make_traffic

SHAPE = FleetShape(
    replicas=20, adapters=600, requests=2000, rows=8, device_bytes=2 * 10**9, host_bytes=4 * 10**9
)
MEASURED = SHAPE.requests - SHAPE.requests // 4


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    return make_traffic(SHAPE, rate=20.0)


def test_a_run_is_a_function_of_its_seed_and_serves_every_request(traffic: Traffic) -> None:
    first, second = (run_policy(SHAPE, traffic, PRODUCT) for _ in range(2))
    assert first.requests == MEASURED and min(first.waits) >= 0
    assert (first.waits, first.read_bytes) == (second.waits, second.read_bytes)


def test_the_product_finds_more_and_moves_less_than_chance(traffic: Traffic) -> None:
    product, chance = (run_policy(SHAPE, traffic, name) for name in (PRODUCT, "random"))
    assert product.device_hits > 1.5 * chance.device_hits
    assert product.copied_bytes < chance.copied_bytes / 2
    assert product.prefix_hits > chance.prefix_hits


def test_memories_keep_their_bounds_and_rows_are_never_exceeded(traffic: Traffic) -> None:
    seen: list[Replica] = []

    class Watching(KnownLoads):
        def report(self, replica: Replica) -> None:
            seen.append(replica)
            assert replica.running <= SHAPE.rows
            assert replica.device_bytes <= SHAPE.device_bytes and replica.host_bytes <= SHAPE.host_bytes
            assert replica.device_bytes == sum(traffic.sizes[each] for each in replica.device)
            assert set(replica.users) <= set(replica.device), "what is in use is not evicted"
            super().report(replica)

    simulation = Simulation(SHAPE, traffic, [Watching(SHAPE, seed) for seed in range(SHAPE.routers)])
    simulation.run()
    assert len(seen) > 1000 and not any(replica.open_requests for replica in simulation.replicas)


def test_traffic_follows_the_day_and_has_bursts(traffic: Traffic) -> None:
    times = traffic.times
    night, day = ((times < times[-1] * 0.15).sum(), (abs(times / times[-1] - 0.45) < 0.075).sum())
    assert day > 1.3 * night
    tenants = {namespace for namespace, _ in traffic.keys}
    assert len(tenants) == SHAPE.adapters / 8 and len(set(traffic.keys)) == SHAPE.adapters


def test_the_report_has_every_policy_and_both_requirements() -> None:
    shape = FleetShape(replicas=8, adapters=100, requests=200, rows=4)
    report = compare_placement(shape, 0.9, lambda _: None)
    assert [case.name.rpartition(",")[0] for case in report.cases[5:]] == ["product", "least loaded"]
    assert len(report.cases) == 7 and all(set(report.columns) <= set(case.figure) for case in report.cases)
    assert [ratio.required for ratio in report.ratios] == [0.9, 1.2, None, None]
