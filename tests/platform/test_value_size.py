"""Sizes of JSON values, and that counting ends where it stops to matter."""

import pytest

from loraplex.platform.value_size import size_of


@pytest.mark.parametrize(
    ("value", "size"),
    [(None, 1), ("abc", 4), ([], 1), (["ab", 1], 5), ({"key": "ab"}, 7), ({"a": {"b": [True]}}, 6)],
)
def test_every_value_and_every_character_counts(value: object, size: int) -> None:
    assert size_of(value, 100) == size


def test_counting_ends_above_the_most() -> None:
    assert 10 < size_of(["a" * 5] * 1_000_000, 10) < 100
