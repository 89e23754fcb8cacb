"""Which captured shape a step takes."""

import pytest

from loraplex.engine.runner.cuda_graphs.buckets import MAX_ROWS, MIXED_TOKENS, Buckets, StepShape


@pytest.mark.parametrize(
    ("rows", "tokens", "decodes", "mixed"),
    [
        (1, 1, [1], [1]),
        (1, 1024, [1, 2, 4, 8, 16, 32], [128, 256, 512, 1024]),
        (3, 24, [1, 2, 3, 6, 12, 24], [24]),
        (8, 256, [1, 2, 4, 8, 16, 32, 64, 128, 256], [128, 256]),
        (64, 1024, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 128, 256], [128, 256, 512, 1024]),
        (64, 4096, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 128, 256], [*MIXED_TOKENS]),
    ],
)
def test_the_sizes(rows: int, tokens: int, decodes: list[int], mixed: list[int]) -> None:
    buckets = Buckets(rows, tokens)
    assert [shape.tokens for shape in buckets.shapes if not shape.chunks] == decodes
    assert [shape.tokens for shape in buckets.shapes if shape.chunks] == mixed
    assert buckets.most == max(decodes + mixed) and buckets.most_decodes == decodes[-1]


def test_many_rows_are_captured_in_longer_strides_and_no_more_than_so_many() -> None:
    buckets = Buckets(10_000, 20_000)
    sizes = [shape.tokens for shape in buckets.shapes if not shape.chunks]
    assert sizes[-4:] == [832, 896, 960, MAX_ROWS] and sizes == sorted(set(sizes))
    assert len(buckets.shapes) < 55


@pytest.mark.parametrize(("rows", "tokens"), [(1, 30), (5, 5), (64, 1024), (300, 3000)])
def test_a_step_takes_the_smallest_that_fits_it(rows: int, tokens: int) -> None:
    buckets = Buckets(rows, tokens)
    steps = [(n, n, 0, min(n, rows)) for n in range(1, buckets.most_decodes + 1)]
    steps += [(n, min(n, rows) - 1, 1, 1) for n in range(1, min(tokens, MIXED_TOKENS[-1]) + 1, 7)]
    for step in steps:
        found = buckets.of(*step)
        assert found is not None and found.fits(*step) and bool(found.chunks) == bool(step[2])
        smaller = [shape for shape in buckets.shapes if shape.tokens < found.tokens and shape.fits(*step)]
        assert not [shape for shape in smaller if bool(shape.chunks) == bool(step[2])]


def test_steps_that_no_shape_fits() -> None:
    buckets = Buckets(64, 4096)
    assert buckets.of(300, 200, 3, 64) == StepShape(512, 256, 64, 64)
    assert buckets.of(2049, 10, 1, 11) is None, "more tokens"
    assert buckets.of(300, 257, 1, 64) is None, "more decodes"
    assert buckets.of(300, 0, 65, 64) is None, "more chunks"
    assert buckets.of(300, 200, 3, 65) is None, "more samples"
    assert buckets.of(257, 257, 0, 64) is None, "more forced tokens"
    assert buckets.of(0, 0, 0, 0) is None


@pytest.mark.parametrize(("rows", "tokens"), [(0, 8), (9, 8)])
def test_impossible_limits_are_refused(rows: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="at least 1 row"):
        Buckets(rows, tokens)
