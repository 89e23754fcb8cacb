"""Every token that the engine reported counts once, in any order and with any end."""

from loraplex.engine.messages import Delta, Failed, Finished, Started, Usage
from loraplex.platform.observability.request_stats import RequestStats
from loraplex.tenants.ledger.histograms import EMPTY, GAP_BOUNDS_MS
from loraplex.tenants.ledger.histograms import counted as histogram
from loraplex.tenants.quotas.reservation import RequestTimings


def stats_of(*lengths: int) -> RequestStats:
    return RequestStats(arrival=0.0, n=2, max_tokens=9, prompt_lengths=lengths)


def counted(counter: RequestStats) -> tuple[int, int, int, int]:
    return counter.prompt_tokens, counter.cached_tokens, counter.completion_tokens, counter.finished_choices


def test_nothing_counts_before_the_engine_has_begun() -> None:
    counter = stats_of(7)
    counter.see(0, Failed("r", "engine_overloaded", "full"))
    assert counted(counter) == (0, 0, 0, 0)


def test_prompts_and_choices_count_separately() -> None:
    counter = stats_of(7, 5)
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
    counter = stats_of(3)
    counter.see(0, Started("a", None, 9))
    counter.see(0, Delta("a", 0, [1], "x"))
    counter.see(0, Finished("a", 0, "abort", Usage(3, 3, 17)))
    assert counted(counter) == (3, 3, 17, 0)


def test_a_prompt_that_ends_early_counts_as_far_as_it_was_computed() -> None:
    counter = stats_of(9, 9)
    counter.see(0, Finished("a", 0, "abort", Usage(6, 4, 0)))
    counter.see(0, Finished("a", 1, "abort", Usage(0, 0, 0)))
    counter.see(1, Finished("b", 0, "abort", Usage(0, 0, 0)))
    assert counted(counter) == (6, 4, 0, 0)
    counter.see(1, Failed("b", "timeout", "late", usage={0: Usage(8, 0, 0)}))
    assert counted(counter) == (14, 4, 0, 0)


def test_the_usage_of_a_failure_adds_what_was_not_delivered() -> None:
    counter = stats_of(3)
    counter.see(0, Started("a", None, 2))
    counter.see(0, Delta("a", 0, [1, 2], "x"))
    counter.see(0, Delta("a", 1, [1], "x"))
    counter.see(0, Failed("a", "timeout", "late", usage={0: Usage(3, 2, 5)}))
    assert counted(counter) == (3, 2, 6, 0)


def test_the_longest_choice_and_the_engines_longest_times() -> None:
    counter = stats_of(3, 3)
    counter.see(0, Started("a", None, 0, queue_s=0.1, prefill_s=0.4))
    counter.see(1, Started("b", None, 0, queue_s=0.2, prefill_s=0.3))
    counter.see(0, Finished("a", 0, "length", Usage(3, 0, 4)))
    counter.see(1, Finished("b", 0, "stop", Usage(3, 0, 9)))
    assert (counter.queue_s, counter.prefill_s) == (0.2, 0.4)
    assert (counter.largest_choice, counter.finish_reason) == (9, "stop")


def test_phases_follow_each_other_from_the_arrival() -> None:
    counter = RequestStats(
        arrival=10.0, n=1, max_tokens=9, prompt_lengths=[3, 3], submitted=10.05, clock=lambda: 11.4
    )
    counter.see(0, Started("a", None, 0, queue_s=0.1, prefill_s=0.4))
    counter.see(1, Started("b", None, 0, queue_s=0.9, prefill_s=0.3, grammar_s=0.2, adapter_s=0.3))
    for choice, now in ((0, 11.5), (1, 11.51), (0, 11.75)):
        counter.deliver(choice, 1, now)
    counter.finished = 12.0
    timings = counter.timings()
    assert (timings.ttft_ms, timings.duration_ms) == (1500, 2000)
    assert timings.phases == {
        "transport": (0, 100),
        "grammar_compile": (100, 200),
        "adapter_load": (300, 300),
        "queue": (600, 400),
        "prefill": (1000, 400),
        "delivery": (1400, 100),
        "decode": (1500, 250),
        "finish": (1750, 250),
    }
    assert timings.gap_buckets == histogram(GAP_BOUNDS_MS, [250.0])


def test_phases_of_the_gateway_come_first_and_all_add_up_to_the_duration() -> None:
    counter = RequestStats(
        arrival=10.0,
        n=1,
        max_tokens=9,
        prompt_lengths=[3],
        submitted=10.3,
        finished=11.0,
        gateway_phases={
            "auth": (9.5, 9.75),
            "admission": (10.125, 10.25),
            "schema_check": (10.25, 10.25),
            # Written while the engine worked, and a while longer.
            "journal": (10.3, 10.875),
        },
        clock=lambda: 10.75,
    )
    counter.see(0, Started("a", None, 0, prefill_s=0.25))
    timings = counter.timings()
    assert timings.duration_ms == 1500
    assert timings.phases == {
        "auth": (0, 250),
        "body": (250, 250),
        "prepare": (500, 125),
        "admission": (625, 125),
        "transport": (750, 250),
        "prefill": (1000, 250),
        "journal": (1250, 125),
        "finish": (1375, 125),
    }


def test_what_did_not_happen_has_no_phase() -> None:
    counter = stats_of(3)
    counter.finished = 0.2
    waited = RequestTimings(duration_ms=200, phases={"engine": (0, 200)}, gap_buckets=EMPTY)
    assert counter.timings() == waited
    counter.clock = lambda: 0.1
    counter.see(0, Started("a", None, 0, queue_s=0.0, prefill_s=0.1))
    assert counter.timings().phases == {"prefill": (0, 100), "finish": (100, 100)}


def test_gaps_are_those_between_delivered_tokens_of_one_choice() -> None:
    counter = stats_of(3)
    for choice, tokens, now in ((0, 1, 1.0), (1, 1, 1.5), (0, 2, 2.0), (1, 0, 3.0)):
        counter.deliver(choice, tokens, now)
    assert (counter.first_token, counter.last_token, counter.token_gaps) == (1.0, 3.0, [0.5, 0.5])
