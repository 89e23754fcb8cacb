"""Engines that are slower than their fellows, on a simulated clock."""

from itertools import count

import pytest

from loraplex.engine.messages import Delta, EngineRequest, Started
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.engines.slow_engines import (
    REDUCED_SHARE,
    REVIEW_S,
    SlowEngines,
    trial_request,
)

NUMBERS = count()


class World:
    """Engines by number with their seconds to a first token and between tokens; each gets `rate` requests between reviews."""

    def __init__(self, *engines: tuple[float, float]) -> None:
        self.now = 100.0
        self.slow = SlowEngines(lambda: self.now)
        self.engines = dict(enumerate(engines))
        self.rate = 6
        self.wanted = 1

    def request(
        self, number: int, *, prompt: int = 10, cached: int = 0, adapter_s: float = 0.0, received: int = 0
    ) -> None:
        first, gap = self.engines[number]
        now = self.now
        wanted = EngineRequest(
            request_id=f"r{next(NUMBERS)}",
            namespace=bytes(32),
            prompt_token_ids=[1] * prompt,
            sampling=SamplingParams(max_tokens=64),
            received={0: [1] * received} if received else {},
        )
        watch = self.slow.watch(number, wanted)
        self.now = now + adapter_s + first * (1 + max(0, prompt - cached + received) / 256)
        watch.see(Started(wanted.request_id, None, cached, adapter_s=adapter_s))
        watch.see(Delta(wanted.request_id, 0, [1], "a"))
        for _ in range(2):
            self.now += 16 * gap
            watch.see(Delta(wanted.request_id, 0, [1] * 16, "a"))
        self.now = now

    def review(self, times: int = 1) -> list[float]:
        """The shares after further reviews, each with requests, or trials, to all engines."""
        for _ in range(times):
            for number in self.engines:
                for _ in range(self.rate):
                    self.request(number)
            self.now += REVIEW_S
            self.slow.review(self.engines.keys(), lambda: self.wanted)
        return [self.slow.share(number) for number in self.engines]


@pytest.mark.parametrize("slow", [(0.6, 0.03), (0.2, 0.09)], ids=["first token", "gaps"])
def test_a_slow_engine_gets_fewer_requests_then_none_and_comes_back(slow: tuple[float, float]) -> None:
    world = World((0.2, 0.03), slow, (0.2, 0.03))
    assert world.review(2) == [1.0, 1.0, 1.0]
    assert world.review() == [1.0, REDUCED_SHARE, 1.0]
    assert world.slow.slowness(1) == pytest.approx(3.0)
    assert world.review(3) == [1.0, 0.0, 1.0]
    assert world.review(9) == [1.0, 0.0, 1.0]
    world.engines[1] = (0.28, 0.042)
    assert world.review(9) == [1.0, 0.0, 1.0], "without load it would be faster than its fellows"
    world.engines[1] = world.engines[0]
    shares = [world.review()[1] for _ in range(12)]
    assert list(dict.fromkeys(shares)) == [0.0, REDUCED_SHARE, 1.0]
    assert shares.count(REDUCED_SHARE) == 3


def test_a_trial_is_of_no_tenant_and_in_no_cache() -> None:
    first, second = trial_request(1000), trial_request(1000)
    assert first.namespace == bytes(32) and first.request_id != second.request_id
    assert first.prompt_token_ids != second.prompt_token_ids
    first.sampling.validate(1000)


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


def test_an_engine_that_takes_over_long_responses_is_not_slow() -> None:
    world = World((0.2, 0.03), (0.2, 0.03))
    world.rate = 0
    for _ in range(9):
        for _ in range(6):
            world.request(0)
            world.request(1, received=4000, cached=266)
        assert world.review() == [1.0, 1.0]


def test_no_engine_is_left_out_that_is_wanted() -> None:
    world = World((0.2, 0.03), (0.6, 0.03), (0.2, 0.03))
    world.wanted = 3
    assert world.review(12) == [1.0, REDUCED_SHARE, 1.0]
    world.wanted = 2
    assert world.review(3) == [1.0, 0.0, 1.0]
    world.wanted = 3
    assert world.review(3) == [1.0, REDUCED_SHARE, 1.0]


def test_an_engine_that_left_is_forgotten() -> None:
    world = World((0.2, 0.03), (0.6, 0.03), (0.2, 0.03))
    assert world.review(6) == [1.0, 0.0, 1.0]
    world.now += REVIEW_S
    assert world.slow.review({0, 2}, lambda: 1) is False
    assert world.slow.share(1) == 1.0
