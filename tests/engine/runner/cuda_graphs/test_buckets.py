"""Which captured size a step takes."""

import pytest

from loraplex.engine.runner.cuda_graphs.buckets import MAX_ROWS, Buckets


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (13, (1, 2, 4, 8, 13)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
    ],
)
def test_the_sizes(most: int, sizes: tuple[int, ...]) -> None:
    assert Buckets(most).sizes == sizes and Buckets(most).most == most


def test_many_rows_are_captured_in_longer_strides_and_no_more_than_so_many() -> None:
    sizes = Buckets(10_000).sizes
    assert sizes[-4:] == (832, 896, 960, MAX_ROWS) and list(sizes) == sorted(set(sizes))
    assert len(sizes) < 50


@pytest.mark.parametrize("most", [1, 5, 64, 300])
def test_a_step_takes_the_smallest_that_holds_it(most: int) -> None:
    buckets = Buckets(most)
    for rows in range(1, most + 1):
        size = buckets.of(rows)
        assert size is not None and size >= rows
        assert not [other for other in buckets.sizes if rows <= other < size]
    assert buckets.of(most + 1) is None and buckets.of(0) is None


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 row"):
        Buckets(0)
