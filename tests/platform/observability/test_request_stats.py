"""Every token that the engine reported counts once, in any order and with any end."""

from loraplex.engine.messages import Delta, Failed, Finished, Started, Usage
from loraplex.platform.observability.request_stats import UsageCounter


def counted(counter: UsageCounter) -> tuple[int, int, int, int]:
    return counter.prompt_tokens, counter.cached_tokens, counter.completion_tokens, counter.finished


def test_nothing_counts_before_the_engine_has_begun() -> None:
    counter = UsageCounter([7])
    counter.see(0, Failed("r", "engine_overloaded", "full"))
    assert counted(counter) == (0, 0, 0, 0)


def test_prompts_and_choices_count_separately() -> None:
    counter = UsageCounter([7, 5])
    counter.see(1, Started("b", None, 4))
    assert counted(counter) == (5, 4, 0, 0)
    counter.see(0, Started("a", None, 0))
    counter.see(0, Delta("a", 0, [1, 2], ""))
    counter.see(0, Delta("a", 1, [1], ""))
    counter.see(1, Delta("b", 0, [1, 2, 3], "x"))
    assert counted(counter) == (12, 4, 6, 0)
    counter.see(0, Finished("a", 0, "stop", Usage(7, 0, 4)))
    assert counted(counter) == (12, 4, 8, 1)


def test_the_usage_of_an_aborted_choice_counts_but_not_as_finished() -> None:
    counter = UsageCounter([3])
    counter.see(0, Started("a", None, 9))
    counter.see(0, Delta("a", 0, [1], "x"))
    counter.see(0, Finished("a", 0, "abort", Usage(3, 3, 17)))
    assert counted(counter) == (3, 3, 17, 0)


def test_a_prompt_that_ends_early_counts_as_far_as_it_was_computed() -> None:
    counter = UsageCounter([9, 9])
    counter.see(0, Finished("a", 0, "abort", Usage(6, 4, 0)))
    counter.see(0, Finished("a", 1, "abort", Usage(0, 0, 0)))
    counter.see(1, Finished("b", 0, "abort", Usage(0, 0, 0)))
    assert counted(counter) == (6, 4, 0, 0)
    counter.see(1, Failed("b", "timeout", "late", usage={0: Usage(8, 0, 0)}))
    assert counted(counter) == (14, 4, 0, 0)


def test_the_usage_of_a_failure_adds_what_was_not_delivered() -> None:
    counter = UsageCounter([3])
    counter.see(0, Started("a", None, 2))
    counter.see(0, Delta("a", 0, [1, 2], "x"))
    counter.see(0, Delta("a", 1, [1], "x"))
    counter.see(0, Failed("a", "timeout", "late", usage={0: Usage(3, 2, 5)}))
    assert counted(counter) == (3, 2, 6, 0)
