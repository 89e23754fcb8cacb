"""Sides of the decisions benchmark are compared by the medians of their rounds."""

from tests.benchmarks.decisions import Side, compare


def side(*seconds: float, gaps: tuple[float, ...] = (1.0,)) -> dict[str, float]:
    found = Side()
    found.seconds, found.p99_itl_s, found.usage = [*seconds], [*gaps], {"input": 7, "cached": 5}
    return found.figures()


def test_medians_are_compared() -> None:
    one = side(1.0, 9.0, 1.0)
    assert (one["p50_s"], one["input_tokens"], one["cached_tokens"]) == (1.0, 7, 5)
    figures = {
        "questions": side(1.3, 1.3, 9.0),
        "one prompt": one,
        "adapters, warm": side(2.0, 2.0, 40.0),
        "one adapter, warm": one,
        "chats, warm": side(6.5),
        "adapters, cold": side(1.4),
        "prompts, cold": one,
        "one question, warm": side(0.5),
        "rows, questions": side(1.0, gaps=(9.0, 1.2, 1.2)),
        "rows, prompts": side(1.0, gaps=(0.5, 0.5, 2.0)),
        "rows, alone": side(1.0, gaps=(1.0, 1.1)),
    }
    assert [ratio.holds for ratio in compare(figures)] == [
        *(True, True, False, True, False, True, False, False),
    ]
