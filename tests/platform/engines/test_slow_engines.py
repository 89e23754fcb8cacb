"""Engines that are slower than their fellows, on a simulated clock."""

from itertools import count

import pytest

from loraplex.engine.messages import Delta, EngineRequest, Started
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.engines.slow_engines import (
    EJECTED_S,
    MAX_EJECTED_S,
    REDUCED_SHARE,
    REVIEW_S,
    SlowEngines,
)

NUMBERS = count()


class World:
    """Engines by number with their seconds to a first token and between tokens; each gets `rate` requests between reviews."""

    def __init__(self, *engines: tuple[float, float]) -> None:
        self.now = 100.0
        self.slow = SlowEngines(lambda: self.now)
        self.engines = dict(enumerate(engines))
        self.rate = 6

    def request(self, number: int, *, prompt: int = 10, cached: int = 0, adapter_s: float = 0.0) -> None:
        first, gap = self.engines[number]
        now = self.now
        wanted = EngineRequest(
            request_id=f"r{next(NUMBERS)}",
            namespace=bytes(32),
            prompt_token_ids=[1] * prompt,
            sampling=SamplingParams(max_tokens=64),
        )
        watch = self.slow.watch(number, wanted)
        self.now = now + adapter_s + first * (1 + (prompt - cached) / 256)
        watch.see(Started(wanted.request_id, None, cached, adapter_s=adapter_s))
        watch.see(Delta(wanted.request_id, 0, [1], "a"))
        for _ in range(2):
            self.now += 16 * gap
            watch.see(Delta(wanted.request_id, 0, [1] * 16, "a"))
        self.now = now

    def review(self, times: int = 1) -> list[float]:
        """The shares after further reviews, each with requests to all engines that get some."""
        for _ in range(times):
            for number in self.engines:
                for _ in range(self.rate if self.slow.share(number) else 0):
                    self.request(number)
            self.now += REVIEW_S
            self.slow.review(self.engines.keys())
        return [self.slow.share(number) for number in self.engines]


@pytest.mark.parametrize("slow", [(0.6, 0.03), (0.2, 0.09)], ids=["first token", "gaps"])
def test_a_slow_engine_gets_fewer_requests_then_none_and_comes_back(slow: tuple[float, float]) -> None:
    world = World((0.2, 0.03), slow, (0.2, 0.03))
    assert world.review(2) == [1.0, 1.0, 1.0]
    assert world.review() == [1.0, REDUCED_SHARE, 1.0]
    assert world.slow.slowness(1) == pytest.approx(3.0)
    assert world.review(3) == [1.0, 0.0, 1.0]
    assert world.review(int(EJECTED_S / REVIEW_S)) == [1.0, REDUCED_SHARE, 1.0]
    world.engines[1] = world.engines[0]
    assert world.review(3) == [1.0, 1.0, 1.0]


def test_an_engine_that_stays_slow_is_away_longer_each_time() -> None:
    world = World((0.2, 0.03), (0.6, 0.03), (0.2, 0.03))
    away = []
    for _ in range(7):
        while world.review()[1] != 0.0:
            pass
        since = world.now
        while world.review()[1] == 0.0:
            pass
        away.append(world.now - since)
    assert away == [EJECTED_S * 2**i for i in range(5)] + [MAX_EJECTED_S] * 2


def test_one_of_two_and_half_of_four_at_most() -> None:
    world = World((0.2, 0.03), (0.6, 0.03))
    assert world.review(9) == [1.0, 0.0]
    world = World((0.2, 0.03), *[(0.6, 0.03)] * 2, (0.2, 0.03), (0.2, 0.03))
    assert world.review(9) == [1.0, 0.0, 0.0, 1.0, 1.0]
    world = World((0.2, 0.03))
    assert world.review(9) == [1.0]


def test_small_differences_and_few_samples_say_nothing() -> None:
    world = World((0.01, 0.001), (0.03, 0.003), (0.01, 0.001))
    assert world.review(9) == [1.0, 1.0, 1.0]
    world = World((0.2, 0.03), (0.9, 0.09), (0.2, 0.03))
    world.rate = 0
    for number in (0, 0, 0, 1, 1):
        world.request(number)
    assert world.review(9) == [1.0, 1.0, 1.0]


def test_long_prompts_and_loads_of_adapters_are_no_fault() -> None:
    world = World((0.2, 0.03), (0.2, 0.03))
    for _ in range(9):
        for _ in range(6):
            world.request(0)
            world.request(1, prompt=4000, cached=100, adapter_s=5.0)
        world.rate = 0
        assert world.review() == [1.0, 1.0]
    assert world.slow.slowness(1) == pytest.approx(1.0)


def test_an_engine_that_left_is_forgotten() -> None:
    world = World((0.2, 0.03), (0.6, 0.03), (0.2, 0.03))
    assert world.review(6) == [1.0, 0.0, 1.0]
    world.now += REVIEW_S
    assert world.slow.review({0, 2}) is False
    assert world.slow.share(1) == 1.0
