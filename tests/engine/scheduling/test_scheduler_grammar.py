"""Rows with grammars in the scheduler: forced tokens, late masks, choices, and requests that end before their mask."""

from typing import TYPE_CHECKING, Any

import pytest

from loraplex.engine.errors import EngineOverloaded, GrammarFailed

if TYPE_CHECKING:
    from tests.engine.conftest import ScriptedMask, Simulation

    SimulationType = type[Simulation]


def prompt(length: int, start: int = 2) -> list[int]:
    return list(range(start, start + length))


def masked(run: "Simulation", mask: "ScriptedMask", **fields: Any) -> Any:
    choices = run.submit(fields.pop("prompt", prompt(5)), grammar=b"{}", **{"max_tokens": 20} | fields)
    run.give_mask(choices, mask)
    return choices[0]


def test_forced_tokens_are_computed_in_one_step(
    simulation: "SimulationType", scripted_mask: "type[ScriptedMask]"
) -> None:
    run = simulation(max_num_batched_tokens=16, max_num_seqs=4)
    row = masked(run, scripted_mask([(5, 6, 7, 8, 9, 2), (5, 6, 7, 8, 9, 3)], fast_forward=True))
    other = run.submit(prompt(5, 50), max_tokens=4)[0]
    run.step()
    assert [(o.token_id, o.first) for o in run.outputs if o.sequence is row] == [
        (5, True),
        *((token, False) for token in (6, 7, 8, 9)),
    ]
    plan = run.step()
    assert plan is not None
    assert [(r.sequence, r.start, r.token_ids) for r in plan.rows] == [
        (other, 5, (other.token_ids[5],)),
        (row, 5, (5, 6, 7, 8, 9)),
    ]
    assert row.finish_reason == "stop" and row.num_output_tokens == 6
    assert run.scheduler.num_forced_tokens == 4
    run.run()
    run.check_idle()


@pytest.mark.parametrize("num_blocks", [9, 64])
def test_forced_tokens_change_no_answer(
    simulation: "SimulationType", scripted_mask: "type[ScriptedMask]", num_blocks: int
) -> None:
    documents = [(*[5] * 9, last, *[6] * 7) for last in (7, 8)]
    runs = []
    for fast_forward in (True, False):
        run = simulation(num_blocks=num_blocks, max_num_batched_tokens=8, max_num_seqs=4)
        for index in range(6):
            masked(
                run, scripted_mask(documents, fast_forward=fast_forward), prompt=prompt(6 + index, 20 + index)
            )
            run.submit(prompt(7, 40 + index), max_tokens=9)
        run.run()
        run.check_idle()
        runs.append(run)
    fast, slow = runs
    assert [s.token_ids for s in fast.sequences] == [s.token_ids for s in slow.sequences]
    assert fast.scheduler.num_forced_tokens > 60 and slow.scheduler.num_forced_tokens == 0
    assert fast.now < slow.now
    assert (fast.scheduler.num_preemptions > 0) == (num_blocks == 9)


def test_a_streaming_response_does_not_wait_for_another_prompt(
    simulation: "SimulationType", scripted_mask: "type[ScriptedMask]"
) -> None:
    run = simulation(max_num_batched_tokens=8, max_num_seqs=4)
    oldest = run.submit(prompt(4), max_tokens=40)[0]
    long = run.submit(prompt(60, 100), max_tokens=2)[0]
    row = masked(run, scripted_mask([(5, 6, 7, 8), (5, 6, 7, 9)], fast_forward=True))
    long.arrival, long.order = row.arrival, row.order - 1
    while not row.num_output_tokens:
        run.step()
    plan = run.step()
    assert plan is not None and {oldest, row} <= {r.sequence for r in plan.rows}
    run.run()
    run.check_idle()


def test_a_late_mask_costs_its_row_a_step_and_nothing_else(
    simulation: "SimulationType", scripted_mask: "type[ScriptedMask]"
) -> None:
    run = simulation()
    row = masked(run, scripted_mask([(5, 6, 7)]), prompt=prompt(8))
    other = run.submit(prompt(5, 50), max_tokens=6)[0]
    run.late = {row}
    for count in range(3):
        run.step()
        assert row.awaits_mask and row.num_output_tokens == 0 and row.num_computed_tokens == 7
        assert other.num_output_tokens == count + 1
    run.late = set()
    row.awaits_mask = False
    run.run()
    assert row.token_ids[8:] == [5, 6, 7]
    run.check_idle()


def test_every_choice_follows_a_mask_of_its_own(
    simulation: "SimulationType", scripted_mask: "type[ScriptedMask]"
) -> None:
    run = simulation()
    mask = scripted_mask([(5, 6, 7), (5, 8, 9), (6, 6, 6)])
    choices = run.submit(prompt(9), grammar=b"{}", max_tokens=5, sampling={"n": 3})
    run.give_mask(choices, mask)
    run.run()
    assert len(mask.forks) == 2
    assert all(tuple(s.token_ids[9:]) in mask.documents and s.finish_reason == "stop" for s in choices)
    run.check_idle()


def test_a_mask_that_refuses_what_was_sampled_fails_its_request_alone(
    simulation: "SimulationType", scripted_mask: "type[ScriptedMask]"
) -> None:
    run = simulation()
    row = masked(run, scripted_mask([(5, 6, 7)], broken="accept"))
    other = run.submit(prompt(5, 50))[0]
    run.run()
    assert [(s, type(e)) for s, e in run.failures] == [(row, GrammarFailed)]
    assert other.finish_reason == "length"
    run.check_idle()


def test_a_request_times_out_while_its_grammar_is_compiled(simulation: "SimulationType") -> None:
    run = simulation()
    run.submit(prompt(5), grammar=b"{}", request_id="late", queue_timeout_s=0.5)
    run.submit(prompt(5), grammar=b"{}", request_id="gone")
    run.scheduler.abort("gone")
    run.run()
    assert [(s.request_id, type(e)) for s, e in run.failures] == [("late", EngineOverloaded)]
    run.check_idle()


def test_the_waits_before_the_first_step_are_measured_one_after_another(
    simulation: "SimulationType", scripted_mask: "type[ScriptedMask]"
) -> None:
    run = simulation(residency={"load_s": 1.0})
    row = run.submit(prompt(5), grammar=b"{}", adapter="slow", max_tokens=2)[0]
    plain = run.submit(prompt(5, 50), max_tokens=30)[0]
    for _ in range(3):
        run.step()
    run.give_mask([row], scripted_mask([(5, 6)]))
    run.run()
    assert row.grammar_s == pytest.approx(0.3)
    assert 1.0 <= row.adapter_s <= 1.2
    assert row.queue_s == pytest.approx(row.grammar_s + row.adapter_s, abs=0.11)
    assert (plain.grammar_s, plain.adapter_s) == (0.0, 0.0)
    run.check_idle()


def test_a_late_first_mask_leaves_other_rows_decoding(
    simulation: "SimulationType", scripted_mask: "type[ScriptedMask]"
) -> None:
    """The last token of its prompt is computed once more, as a chunk: rows behind it would be chunks too."""
    run = simulation()
    row = masked(run, scripted_mask([(5, 6, 7)]), prompt=prompt(8))
    other = run.submit(prompt(5, 50), max_tokens=6)[0]
    run.late = {row}
    run.step()
    row.awaits_mask = False
    plan = run.step()
    assert plan is not None
    assert [(r.sequence, r.decodes) for r in plan.rows] == [(other, True), (row, False)]
