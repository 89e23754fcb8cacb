"""Sizes of JSON values, and that counting ends where it stops to matter."""

from typing import NoReturn

import pytest

from loraplex.platform.parameters.json_object import size_of


@pytest.mark.parametrize(
    ("value", "size"),
    [(None, 1), ("abc", 4), ([], 1), (["ab", 1], 5), ({"key": "ab"}, 7), ({"a": {"b": [True]}}, 6)],
)
def test_every_value_and_every_character_counts(value: object, size: int) -> None:
    assert size_of(value, 100) == size


def test_counting_ends_above_the_most() -> None:
    assert size_of(["a" * 5, ["a"] * 5, "a" * 5], 10) == 13


class Unread(list[object]):
    def __iter__(self) -> NoReturn:
        raise AssertionError("read although its length decides")


def test_a_long_list_is_not_read() -> None:
    assert size_of({"a": Unread([0] * 1_000)}, 100) > 100
