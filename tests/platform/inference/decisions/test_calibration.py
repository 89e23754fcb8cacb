"""A temperature makes an overconfident distribution honest, and leaves an honest one as it is."""

import random

import pytest

from loraplex.platform.inference.decisions.calibration import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Labelled,
    best_temperature,
    quality_of,
    tempered,
)


def honest(count: int, options: int, seed: int = 0) -> list[Labelled]:
    """Examples whose right option is drawn from their own distribution."""
    chance = random.Random(seed)
    examples = []
    for _ in range(count):
        weights = [chance.expovariate(1) for _ in range(options)]
        shares = [each / sum(weights) for each in weights]
        examples.append(Labelled(shares, chance.choices(range(options), shares)[0]))
    return examples


def at(temperature: float, examples: list[Labelled]) -> list[Labelled]:
    return [Labelled(tempered(each.probabilities, temperature), each.right) for each in examples]


@pytest.mark.parametrize("options", [2, 5, 30])
@pytest.mark.parametrize("wrong", [0.25, 0.5, 1.0, 3.0])
def test_the_temperature_undoes_what_was_done(options: int, wrong: float) -> None:
    examples = at(wrong, honest(2000, options))
    found = best_temperature(examples[::2])
    assert found == pytest.approx(1 / wrong, rel=0.15)
    before, after = quality_of(examples[1::2]), quality_of(at(found, examples[1::2]))
    assert after.accuracy == before.accuracy and after.brier <= before.brier + 0.01
    assert after.ece <= (before.ece / 2 if wrong < 1 and options < 30 else before.ece + 0.02)


def test_few_examples_of_an_honest_model_change_nothing() -> None:
    """Their maximum of the likelihood is chance, in most cases some way from 1."""
    found = [best_temperature(honest(20, 3, seed)) for seed in range(200)]
    assert sum(each != 1 for each in found) <= 20


def test_temperatures_are_inverted_exactly() -> None:
    for example in honest(50, 4):
        again = tempered(tempered(example.probabilities, 0.3), 1 / 0.3)
        assert again == pytest.approx(example.probabilities, abs=1e-9)


def test_the_extremes_are_bounds() -> None:
    sure = [Labelled([0.9, 0.1], 0)] * 50
    assert MIN_TEMPERATURE <= best_temperature(sure) < 2 * MIN_TEMPERATURE
    assert best_temperature([Labelled([0.9, 0.1], 1)] * 20) == pytest.approx(MAX_TEMPERATURE, rel=1e-3)


def test_quality_counts_by_hand() -> None:
    quality = quality_of([Labelled([0.8, 0.2], 0), Labelled([0.8, 0.2], 1)])
    assert quality.accuracy == 0.5 and quality.ece == pytest.approx(0.3)
    assert quality.brier == pytest.approx((0.08 + 1.28) / 2)
