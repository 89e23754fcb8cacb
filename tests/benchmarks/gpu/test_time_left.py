"""How much a job begins in the time that it has."""

import pytest
from tests.benchmarks.gpu.time_left import TimeLeft


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 1), (-5.0, 1), (5.9, 2), (6.0, 3), (100.0, 4)])
def test_a_round_begins_where_the_longest_so_far_fits(seconds: float, rounds: int) -> None:
    clock = Clock()
    left, found = TimeLeft(clock.now + seconds, clock), []
    for number in left.rounds(4):
        found.append(number)
        clock.now += 2.0
    assert found == [*range(rounds)]
