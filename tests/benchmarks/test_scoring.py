"""Gaps between tokens are counted while the load runs, and compared by the quietest rounds."""

import pytest
from tests.benchmarks.scoring import BesideLoad, compare, figures_of, gaps_beside
from tests.platform.bench.test_client import REQUEST, USAGE, event, text

from loraplex.platform.bench.client import StreamRecord
from loraplex.platform.bench.report import BenchFailed


def streamed(times: list[float], sent_at: float = 0.0) -> StreamRecord:
    """A whole stream with one piece of text at each time."""
    end = event(choices=[], usage=USAGE) + b"data: [DONE]\n\n"
    chunks = [*((at, text("x")) for at in times), (times[-1], end)]
    return StreamRecord(REQUEST, sent_at=sent_at, ended_at=times[-1], chunks=chunks)


def test_gaps_are_those_beside_the_load() -> None:
    row = streamed([1.0, 1.5, 2.25, 4.0, 4.5, 5.0])
    found = gaps_beside([row], 2.0, 4.25)
    assert found.gaps == (0.75, 1.75, 0.5) and found.seconds == 2.25


def test_a_row_that_ended_before_the_load_is_no_measurement() -> None:
    with pytest.raises(BenchFailed, match="ended before"):
        gaps_beside([streamed([1.0, 2.0])], 1.5, 4.0)


def rounds(*slowest: float, step: float = 0.2) -> dict[str, float]:
    return figures_of([BesideLoad((*[step] * 90, *[each] * 10), 10.0) for each in slowest])


def test_a_burst_in_some_rounds_is_no_slowdown_and_one_in_all_is() -> None:
    quiet, burst, slow = rounds(0.2, 0.2, 0.2), rounds(0.4, 0.2, 0.4), rounds(0.4, 0.26, 0.4)
    assert [ratio.holds for ratio in compare(quiet, burst)] == [True, True]
    assert [ratio.holds for ratio in compare(quiet, slow)] == [False, True]
    assert (burst["median_p99_itl_ms"], burst["worst_p99_itl_ms"], burst["gaps"]) == (400, 400, 300)


def test_steps_that_are_all_a_little_slower_are_a_slowdown() -> None:
    ratios = list(compare(rounds(0.3, 0.3), rounds(0.3, 0.3, step=0.24)))
    assert [ratio.holds for ratio in ratios] == [True, False]
