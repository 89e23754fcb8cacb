"""The random number of a draw is a fixed function of (seed, choice, position), and the numbers are uniform."""

from loraplex.engine.sampling.sampling_batch import uniform


def test_the_numbers_are_the_same_for_ever() -> None:
    assert uniform(1, 0, 0) == 0.3372231567267142
    assert uniform(-(2**70), 3, 10**6) == uniform(-(2**70), 3, 10**6)


def test_every_argument_matters() -> None:
    numbers = [uniform(s, c, p) for s in (1, 2, 11) for c in (0, 1, 11) for p in (0, 1, 11)]
    assert len(set(numbers)) == len(numbers)


def test_the_numbers_are_uniform() -> None:
    buckets = [0] * 20
    for position in range(20_000):
        number = uniform(42, 0, position)
        assert 0.0 <= number < 1.0
        buckets[int(number * 20)] += 1
    # 19 degrees of freedom: 43.8 is exceeded once in a thousand seeds, and this seed is fixed.
    assert sum((count - 1000) ** 2 / 1000 for count in buckets) < 43.8
