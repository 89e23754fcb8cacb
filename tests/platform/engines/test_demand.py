"""How many engines the requests need, on a simulated clock."""

import pytest

from loraplex.engine.messages import EngineStats
from loraplex.platform.engines.demand import Demand


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def busy(running: int, waiting: int = 0) -> EngineStats:
    return EngineStats(running=running, waiting=waiting, max_running=10)


def test_rows_and_queues_of_all_engines(clock: Clock) -> None:
    demand = Demand(clock)
    assert demand.engines_wanted([]) == 1
    assert demand.engines_wanted([busy(0), busy(0)]) == 1
    assert demand.engines_wanted([busy(7)]) == 1
    assert demand.engines_wanted([busy(8)]) == 2
    assert demand.engines_wanted([busy(10, 12), busy(6)]) == 4


def test_waves_between_two_looks_count_by_their_mean(clock: Clock) -> None:
    demand = Demand(clock)
    for _ in range(10):
        for _ in range(28):
            demand.change(1)
        clock.now += 3.0
        for _ in range(28):
            demand.change(-1)
        clock.now += 3.0
    assert demand.engines_wanted([busy(0)]) == 2
    clock.now += 60.0
    assert demand.engines_wanted([busy(0)]) == 1
