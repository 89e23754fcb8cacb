"""One behaviour of the scheduler per test, driven through the simulated engine of conftest."""

from typing import TYPE_CHECKING, Any

import pytest

from loraplex.engine.batch.sequence import SequenceStatus
from loraplex.engine.batch.step_plan import SampledToken
from loraplex.engine.errors import (
    AdapterLoadFailed,
    EngineOverloaded,
    InvalidRequest,
    NonFiniteLogits,
    NothingAllowed,
    PromptTooLong,
    RequestTimeout,
)

if TYPE_CHECKING:
    from tests.engine.conftest import ScriptedMask, Simulation

    SimulationType = type[Simulation]


def prompt(length: int, start: int = 2) -> list[int]:
    return list(range(start, start + length))


def test_decodes_come_first_and_chunks_fill_the_budget(simulation: "SimulationType") -> None:
    run = simulation(max_num_batched_tokens=8, max_num_seqs=4)
    first = run.submit(prompt(5), max_tokens=10)[0]
    run.step()
    second = run.submit(prompt(20, 50), max_tokens=2)[0]
    plan = run.step()
    assert plan is not None
    assert [(row.sequence, row.start, len(row.token_ids), row.samples) for row in plan.rows] == [
        (first, 5, 1, True),
        (second, 0, 7, False),
    ]
    run.run()
    run.check_idle()


@pytest.mark.parametrize(
    ("tokens", "fields", "error", "field"),
    [
        ([], {}, InvalidRequest, "prompt"),
        ([-1], {}, InvalidRequest, "prompt"),
        ([1 << 32], {}, InvalidRequest, "prompt"),
        ([2], {"weight": 0.0}, InvalidRequest, "weight"),
        ([2], {"weight": float("nan")}, InvalidRequest, "weight"),
        ([2], {"max_tokens": 0}, InvalidRequest, "max_tokens"),
        (prompt(60), {"max_tokens": 5}, PromptTooLong, "prompt"),
        (prompt(30), {"max_tokens": 11}, PromptTooLong, "prompt"),
    ],
)
def test_what_can_never_run_is_refused(
    simulation: "SimulationType", tokens: list[int], fields: dict[str, Any], error: type, field: str
) -> None:
    run = simulation(num_blocks=10, max_model_len=64)
    with pytest.raises(InvalidRequest) as caught:
        run.submit(tokens, **fields)
    assert type(caught.value) is error and caught.value.field == field
    assert run.scheduler.num_rejections == 1
    run.check_idle()


def test_a_request_that_just_fits_the_pool_runs(simulation: "SimulationType") -> None:
    run = simulation(num_blocks=10)
    sequence = run.submit(prompt(30), max_tokens=10)[0]
    run.run()
    assert (sequence.finish_reason, sequence.num_output_tokens) == ("length", 10)


def test_the_waiting_queue_is_bounded_and_counts_choices(simulation: "SimulationType") -> None:
    run = simulation(max_waiting=3)
    run.submit([2], sampling={"n": 2})
    with pytest.raises(EngineOverloaded):
        run.submit([2], sampling={"n": 2})
    run.submit([2])
    with pytest.raises(InvalidRequest, match="in use"):
        run.submit([2], request_id="r0")


def test_a_repeated_prompt_is_found_in_the_cache_by_its_own_tenant_only(simulation: "SimulationType") -> None:
    run = simulation()
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 0),
        ({}, 12),
        ({"tenant": "other"}, 0),
        ({"adapter": "d"}, 0),
        ({"cache_salt": b"s"}, 0),
        ({"cache_salt": b"s"}, 12),
    ]
    for fields, cached in cases:
        sequence = run.submit(prompt(13), **fields)[0]
        run.run()
        assert sequence.num_cached_tokens == cached, fields
    assert (run.scheduler.prefix_cache_queries, run.scheduler.prefix_cache_hits) == (6 * 13, 24)
    run.check_idle()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_choices_share_the_full_blocks_of_the_prompt(
    simulation: "SimulationType", prefix_caching: bool
) -> None:
    run = simulation(prefix_caching=prefix_caching)
    choices = run.submit(prompt(14), max_tokens=3, sampling={"n": 3, "seed": 7})
    first = run.step()
    assert first is not None and [row.sequence for row in first.rows] == choices[:1]
    second = run.step()
    assert second is not None
    assert sorted((row.sequence.choice, row.start, len(row.token_ids)) for row in second.rows) == [
        (0, 14, 1),
        (1, 12, 2),
        (2, 12, 2),
    ]
    assert choices[0].block_table[:3] == choices[1].block_table[:3] == choices[2].block_table[:3]
    assert len({choice.block_table[3] for choice in choices}) == 3
    assert {choice.seed for choice in choices} == {7}
    run.run()
    run.check_idle()
    assert all(choice.finish_reason == "length" for choice in choices)


def test_siblings_go_on_when_the_first_choice_is_ended_early(simulation: "SimulationType") -> None:
    run = simulation()
    choices = run.submit(prompt(14), sampling={"n": 2})
    run.scheduler.finish(choices[0], "stop")
    run.scheduler.finish(choices[0], "stop")
    run.run()
    run.check_idle()
    assert [choice.finish_reason for choice in choices] == ["stop", "length"]


def test_the_newest_is_preempted_and_recomputes_the_same_tokens(simulation: "SimulationType") -> None:
    solo = simulation()
    alone = [solo.submit(prompt(8, 10 * i), max_tokens=16)[0] for i in range(1, 5)]
    solo.run()
    run = simulation(num_blocks=14)
    crowded = [run.submit(prompt(8, 10 * i), max_tokens=16)[0] for i in range(1, 5)]
    run.run()
    run.check_idle()
    assert run.scheduler.num_preemptions > 0
    assert crowded[0].num_preemptions == 0
    assert [s.token_ids for s in crowded] == [s.token_ids for s in alone]


@pytest.mark.parametrize("caching", [True, False])
def test_waiting_siblings_give_their_blocks_back_when_the_pool_is_short(
    simulation: "SimulationType", caching: bool
) -> None:
    run = simulation(num_blocks=12, max_num_seqs=1, prefix_caching=caching)
    choices = run.submit(prompt(20), max_tokens=28, sampling={"n": 3})
    other = run.submit(prompt(30, 40), tenant="other", max_tokens=18)[0]
    run.run()
    run.check_idle()
    assert {s.finish_reason for s in [*choices, other]} == {"length"}


def test_ends_by_token(simulation: "SimulationType") -> None:
    def ended(tokens: list[int], **sampling: Any) -> tuple[str | None, int, int | None]:
        run = simulation(max_model_len=12)
        sequence = run.submit(prompt(4), max_tokens=sampling.pop("max_tokens", 8), sampling=sampling)[0]
        for token in tokens:
            plan = run.scheduler.schedule()
            assert plan is not None
            run.scheduler.complete(plan, {sequence: SampledToken(token)})
            if sequence.finish_reason:
                break
        return sequence.finish_reason, sequence.num_output_tokens, sequence.stopped_by

    assert ended([5, 1, 5]) == ("stop", 2, None)
    assert ended([5, 1, 5], max_tokens=3, ignore_eos=True) == ("length", 3, None)
    assert ended([1, 1, 1], min_tokens=2) == ("stop", 2, None)
    assert ended([9, 8], stop_token_ids=(8,)) == ("stop", 2, 8)
    assert ended([8, 9, 8], stop_token_ids=(8,), min_tokens=2) == ("stop", 3, 8)
    assert ended([5] * 9) == ("length", 8, None)


def test_a_non_finite_row_fails_alone_and_leaves_nothing_in_the_cache(simulation: "SimulationType") -> None:
    run = simulation()
    bad, sibling = run.submit(prompt(9), sampling={"n": 2})
    good = run.submit(prompt(9, 50))[0]
    run.step()
    run.nan.add(bad)
    run.run()
    run.check_idle()
    assert [(s, type(e)) for s, e in run.failures] == [(bad, NonFiniteLogits)]
    assert sibling.status is SequenceStatus.FINISHED and good.finish_reason == "length"
    again = run.submit(prompt(9))[0]
    run.run()
    assert again.num_cached_tokens == 0


def test_a_row_with_no_token_left_fails_alone_and_the_model_is_innocent(
    simulation: "SimulationType",
) -> None:
    run = simulation()
    stuck, good = run.submit(prompt(9))[0], run.submit(prompt(9, 50))[0]
    plan = run.scheduler.schedule()
    assert plan is not None
    sampled = run.execute(plan) | {stuck: SampledToken(-1, finite=False, nothing_allowed=True)}
    run.scheduler.complete(plan, sampled)
    ((failed, error),) = run.scheduler.take_failures()
    assert failed is stuck and type(error) is NothingAllowed
    run.run()
    assert good.num_output_tokens == 4
    run.check_idle()


def test_rows_aborted_while_the_step_runs_are_dropped(simulation: "SimulationType") -> None:
    run = simulation()
    sequence = run.submit(prompt(5))[0]
    plan = run.scheduler.schedule()
    assert plan is not None
    assert run.scheduler.abort("r0") == [sequence]
    assert run.scheduler.abort("r0") == []
    assert run.scheduler.complete(plan, run.execute(plan)) == []
    assert run.scheduler.take_failures() == []
    run.check_idle()


def test_deadlines(simulation: "SimulationType") -> None:
    run = simulation(max_num_seqs=1)
    running = run.submit(prompt(5), max_tokens=40, queue_timeout_s=0.3, total_timeout_s=1.0)[0]
    queued = run.submit(prompt(5, 50), max_tokens=2, queue_timeout_s=0.3)[0]
    patient = run.submit(prompt(5, 90), max_tokens=2, queue_timeout_s=30.0, total_timeout_s=30.0)[0]
    run.run()
    run.check_idle()
    assert [(s, type(e), str(e).split("`")[1]) for s, e in run.failures] == [
        (queued, EngineOverloaded, "queue_timeout_s"),
        (running, RequestTimeout, "total_timeout_s"),
    ]
    assert patient.finish_reason == "length"
    assert running.queue_s == 0.0 and queued.queue_s == 0.0 and patient.queue_s >= 1.0


def test_the_first_token_of_a_request_has_its_time_in_the_queue_in_prefill_and_while_its_adapter_loads(
    simulation: "SimulationType",
) -> None:
    run = simulation(residency={"load_s": 1.0}, max_num_seqs=4, max_num_batched_tokens=16)
    early = run.submit(prompt(5), max_tokens=40, first_token_timeout_s=0.3)[0]
    chunked = run.submit(prompt(200, 7), max_tokens=2, first_token_timeout_s=0.3)[0]
    loading = run.submit(prompt(5, 50), max_tokens=2, adapter="slow", first_token_timeout_s=0.3)[0]
    masked = run.submit(prompt(5, 70), max_tokens=2, grammar=b"{}", first_token_timeout_s=0.3)[0]
    patient = run.submit(prompt(5, 90), max_tokens=2, first_token_timeout_s=30.0)[0]
    run.run()
    run.check_idle()
    assert {s for s, _ in run.failures} == {chunked, loading, masked}
    for sequence, error in run.failures:
        assert type(error) is RequestTimeout and "`first_token_timeout_s`" in str(error)
        assert sequence.num_output_tokens == 0
    assert early.finish_reason == patient.finish_reason == "length"
    assert 0 < chunked.num_prefilled_tokens < 200


def test_the_choices_of_a_request_have_one_first_token(simulation: "SimulationType") -> None:
    """Choices that wait for a row after it are late for nothing."""
    run = simulation(max_num_seqs=1)
    first, second = run.submit(prompt(5), sampling={"n": 2}, max_tokens=10, first_token_timeout_s=0.3)
    run.run()
    assert first.finish_reason == second.finish_reason == "length" and not run.failures
    assert second.first_token_at is not None and second.first_token_at - second.arrival > 0.3


def test_a_sequence_waits_for_its_mask_while_others_pass(
    simulation: "SimulationType", scripted_mask: "type[ScriptedMask]"
) -> None:
    run = simulation()
    masked = run.submit(prompt(5), grammar=b"{}")[0]
    other = run.submit(prompt(5, 50))[0]
    for _ in range(5):
        run.step()
    assert other.finish_reason == "length" and masked.num_output_tokens == 0
    assert run.scheduler.num_waiting_for_grammar == 1
    run.give_mask([masked], scripted_mask([(5, 6, 7)]))
    run.run()
    assert masked.finish_reason == "stop" and masked.token_ids[-3:] == [5, 6, 7]


def test_loading_adapters_let_others_pass_and_broken_ones_fail(simulation: "SimulationType") -> None:
    run = simulation(residency={"load_s": 1.0, "broken": {"bad"}})
    slow = run.submit(prompt(5), adapter="slow")[0]
    bad = run.submit(prompt(5), adapter="bad")[0]
    base = run.submit(prompt(5))[0]
    run.step()
    assert slow.status is SequenceStatus.LOADING
    assert run.scheduler.num_waiting_for_adapter == 2
    assert run.scheduler.waiting_adapters == ["bad", "slow"]
    run.run()
    run.check_idle()
    assert run.first_token_at[base] < 0.2 and 1.0 < run.first_token_at[slow] < 1.3
    assert [(s, type(e)) for s, e in run.failures] == [(bad, AdapterLoadFailed)]


def test_at_most_so_many_adapters_in_a_step(simulation: "SimulationType") -> None:
    run = simulation(residency={"budget": 8}, max_adapters_per_step=2)
    for index in range(12):
        run.submit(prompt(5), adapter=f"a{index % 6}", max_tokens=3 + index)
    base = run.submit(prompt(5), max_tokens=2)[0]
    seen = 0
    while run.scheduler.has_unfinished:
        run.step()
        seen = max(seen, len(run.scheduler.running_adapters))
    run.check_idle()
    assert seen == 2 and run.first_token_at[base] < 0.5
    assert all(s.finish_reason == "length" for s in run.sequences)


@pytest.mark.parametrize(
    "limits",
    [{"residency": {"budget": 2}}, {"residency": {"budget": 9}, "max_adapters_per_step": 2}],
    ids=["bytes", "cap"],
)
def test_an_adapters_wait_is_bounded_although_others_never_pause(
    simulation: "SimulationType", limits: dict[str, Any]
) -> None:
    run = simulation(max_adapter_wait_s=3.0, max_num_seqs=8, **limits)
    rare = None
    for step in range(120):
        if step % 4 == 0:
            run.submit(prompt(5), tenant="busy", adapter="x", max_tokens=10)
            run.submit(prompt(5), tenant="busy", adapter="y", max_tokens=10)
        if step == 5:
            rare = run.submit(prompt(5), tenant="rare", adapter="z", max_tokens=3)[0]
        run.step()
    assert rare is not None
    assert 3.0 < run.first_token_at[rare] - rare.arrival < 3.0 + 1.2 + 0.5
    run.run()
    run.check_idle()
    assert all(s.finish_reason == "length" for s in run.sequences)


def test_an_overdue_adapter_is_read_although_one_that_was_read_before_finds_no_room(
    simulation: "SimulationType",
) -> None:
    """Both become late at once, and the policy's first is the one that the stopped loader has not read."""
    run = simulation(
        max_adapter_wait_s=2.0, max_num_seqs=8, residency={"budget": 2, "load_s": 1.0, "stops": True}
    )
    late = None
    for step in range(120):
        if step % 4 == 0:
            for hot in "xy":
                run.submit(prompt(5), tenant="busy", adapter=hot, max_tokens=10)
        if step == 12:
            run.submit(prompt(5), tenant="busy", adapter="big", max_tokens=3)
        if step == 13:
            late = run.submit(prompt(5), tenant="late", adapter="z", max_tokens=3)[0]
        if step == 30:
            run.now += 0.6
        run.step()
    assert late is not None and run.first_token_at[late] - late.arrival < 2.0 + 0.6 + 2 * 1.2 + 0.5


def test_a_tenant_whose_loads_fill_its_half_is_passed_by(simulation: "SimulationType") -> None:
    run = simulation(residency={"budget": 8, "load_s": 1.0}, max_num_seqs=8)
    run.submit(prompt(40), tenant="next", max_tokens=30)
    run.step()
    for index in range(3):
        run.submit(prompt(5), tenant="first", adapter=f"a{index}")
    after = run.submit(prompt(5), tenant="next", adapter="b")[0]
    run.step()
    loading = [digest for _, digest in run.residency.without_room]
    assert loading == ["a0", "a1", "b"], "its third one is refused, although it would come before"
    run.run()
    assert run.first_token_at[after] - after.arrival < 1.0 + 0.3


def test_a_tenant_reads_although_the_loads_ahead_are_anothers(simulation: "SimulationType") -> None:
    """Four adapters may be ahead of the free rows: one has come and holds each of them, for lack of a row."""
    run = simulation(residency={"budget": 16}, max_num_seqs=2, max_adapters_per_step=8, max_slot_wait_s=100.0)
    for _ in range(2):
        run.submit(prompt(5), tenant="busy", max_tokens=200)
    run.step()
    for index in range(6):
        run.submit(prompt(5), tenant="busy", adapter=f"a{index}")
        run.step()
    assert len(run.residency.due) == 4 and not run.residency.without_room
    run.submit(prompt(5), tenant="other", adapter="b")
    run.step()
    assert [digest for _, digest in run.residency.without_room] == ["b"]


def test_adapters_whose_requests_are_gone_block_no_load(simulation: "SimulationType") -> None:
    run = simulation(residency={"budget": 1}, max_num_seqs=8)
    run.submit(prompt(5), adapter="running", max_tokens=100)
    run.step()
    run.step()
    gone = [run.submit(prompt(5, 20 * i), adapter=f"gone {i}")[0] for i in range(1, 5)]
    run.step()
    assert len(run.residency.without_room) == 2, "they fill their tenant's half of the loads in flight"
    for sequence in gone:
        run.scheduler.abort(sequence.request_id)
    run.submit(prompt(5, 200), adapter="wanted")
    run.step()
    assert [digest for _, digest in run.residency.without_room] == ["wanted"]
    run.run()
    run.check_idle()


@pytest.mark.parametrize("overlap", [False, True])
def test_computed_prompt_tokens_are_counted_once_whatever_becomes_of_them(
    simulation: "SimulationType", overlap: bool
) -> None:
    run = simulation(max_num_batched_tokens=8, max_num_seqs=4, num_blocks=16, overlap=overlap)
    for chunks in range(4):
        left = run.submit(prompt(30, 100 * chunks + 2))[0]
        for _ in range(chunks):
            run.step()
        run.scheduler.abort(left.request_id)
        assert left.num_prefilled_tokens == 8 * chunks
    waited = run.submit(prompt(30, 500), adapter="absent")[0]
    run.scheduler.abort(waited.request_id)
    assert waited.num_prefilled_tokens == 0


def test_a_preempted_sequence_keeps_the_count_of_its_computed_prompt(simulation: "SimulationType") -> None:
    run = simulation(num_blocks=7, prefix_caching=False)
    first, second = (run.submit(prompt(9, start), max_tokens=12)[0] for start in (2, 50))
    while not second.num_preemptions:
        run.step()
    run.scheduler.abort(second.request_id)
    assert (second.num_computed_tokens, second.num_prefilled_tokens) == (0, 9)
    run.run()
    assert first.num_prefilled_tokens == 9
    run.check_idle()
