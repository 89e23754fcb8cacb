"""Every token the engine told of counts once, whatever order and end."""

from loraplex.engine.messages import Delta, Failed, Finished, Started, Usage
from loraplex.platform.observability.request_stats import UsageCounter


def counted(meter: UsageCounter) -> tuple[int, int, int, int]:
    return meter.prompt_tokens, meter.cached_tokens, meter.completion_tokens, meter.finished


def test_nothing_counts_before_the_engine_has_begun() -> None:
    meter = UsageCounter([7])
    meter.see(0, Failed("r", "engine_overloaded", "full"))
    assert counted(meter) == (0, 0, 0, 0)


def test_prompts_and_choices_count_apart() -> None:
    meter = UsageCounter([7, 5])
    meter.see(1, Started("b", None, 4))
    assert counted(meter) == (5, 4, 0, 0)
    meter.see(0, Started("a", None, 0))
    meter.see(0, Delta("a", 0, [1, 2], ""))
    meter.see(0, Delta("a", 1, [1], ""))
    meter.see(1, Delta("b", 0, [1, 2, 3], "x"))
    assert counted(meter) == (12, 4, 6, 0)
    meter.see(0, Finished("a", 0, "stop", Usage(7, 0, 4)))
    assert counted(meter) == (12, 4, 8, 1)


def test_the_last_word_on_an_aborted_choice_counts_but_is_no_end_of_its_own() -> None:
    meter = UsageCounter([3])
    meter.see(0, Started("a", None, 9))
    meter.see(0, Delta("a", 0, [1], "x"))
    meter.see(0, Finished("a", 0, "abort", Usage(3, 3, 17)))
    assert counted(meter) == (3, 3, 17, 0)
