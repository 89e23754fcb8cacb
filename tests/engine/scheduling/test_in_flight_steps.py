"""Running ahead of the device: whatever a step in flight brings, the token streams are those of a scheduler that waits."""

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.batch.step_plan import UNKNOWN_TOKEN

if TYPE_CHECKING:
    from tests.engine.conftest import ScriptedMask, Simulation

    SimulationType = type[Simulation]

VOCABULARY = range(10, 1010)


def prompt(length: int, start: int = 2) -> list[int]:
    return list(range(start, start + length))


def submit_all(run: "Simulation", seed: int, scripted_mask: "type[ScriptedMask]") -> None:
    """The same requests for every run of one seed, in portions between steps."""
    random_ = random.Random(seed)
    for index in range(24):
        masked = random_.random() < 0.3
        choices = run.submit(
            [2] * random_.choice([1, 9, 16]) + [random_.randint(2, 4) for _ in range(random_.randint(1, 9))],
            request_id=str(index),
            tenant=random_.choice("tu"),
            adapter=random_.choice([None, None, "a", "b"]),
            max_tokens=random_.randint(1, 16),
            sampling={
                "n": random_.choice([1, 1, 3]),
                "stop_token_ids": tuple(random_.sample(VOCABULARY, 100)),
                "min_tokens": random_.choice([0, 1]),
            },
            **({"grammar": b"{}"} if masked else {}),
        )
        if masked:
            documents = [
                tuple(random_.randint(5, 7) for _ in range(random_.randint(1, 12)))
                for _ in range(random_.randint(1, 4))
            ]
            fast_forward, closes = random_.random() < 0.7, random_.random() < 0.7
            run.give_mask(choices, scripted_mask(documents, fast_forward=fast_forward, closes=closes))
        for _ in range(random_.choice([0, 0, 1, 4])):
            run.step()


def streams(run: "Simulation") -> dict[tuple[str, int], tuple[list[int], str | None]]:
    return {(s.request_id, s.choice): (s.token_ids, s.finish_reason) for s in run.sequences}


def reported_tokens(run: "Simulation", sequence: Sequence) -> list[int]:
    return [output.token_id for output in run.outputs if output.sequence is sequence]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 32),
    blocks=st.sampled_from([12, 20, 80]),
    caching=st.booleans(),
    seqs=st.sampled_from([1, 5]),
)
def test_running_ahead_changes_no_stream(
    simulation: "SimulationType",
    scripted_mask: "type[ScriptedMask]",
    seed: int,
    blocks: int,
    caching: bool,
    seqs: int,
) -> None:
    runs = [
        simulation(
            num_blocks=blocks,
            prefix_caching=caching,
            max_num_seqs=seqs,
            max_num_batched_tokens=16,
            max_model_len=48,
            overlap=overlap,
        )
        for overlap in (False, True)
    ]
    for run in runs:
        submit_all(run, seed, scripted_mask)
        run.run()
        run.check_idle()
        for sequence in run.sequences:
            assert reported_tokens(run, sequence) == sequence.token_ids[sequence.num_prompt_tokens :]
    assert streams(runs[0]) == streams(runs[1])


def test_the_next_step_is_planned_with_a_token_that_is_not_known(simulation: "SimulationType") -> None:
    run = simulation(overlap=True)
    row = run.submit(prompt(3), max_tokens=4)[0]
    plans = [run.step() for _ in range(5)]
    assert [None if p is None else (p.rows[0].start, p.rows[0].token_ids) for p in plans] == [
        (0, (2, 3, 4)),
        (3, (UNKNOWN_TOKEN,)),
        (4, (UNKNOWN_TOKEN,)),
        (5, (UNKNOWN_TOKEN,)),
        None,
    ]
    assert row.finish_reason == "length" and len(reported_tokens(run, row)) == 4
    run.check_idle()


def test_what_was_computed_for_a_row_that_stopped_is_dropped(simulation: "SimulationType") -> None:
    solo = simulation()
    alone = solo.submit(prompt(3), max_tokens=9)[0]
    solo.run()
    stop = alone.token_ids[5]
    run = simulation(overlap=True)
    row = run.submit(prompt(3), max_tokens=9, sampling={"stop_token_ids": (stop,)}, adapter="a")[0]
    while row.finish_reason is None:
        run.step()
    assert run.in_flight is not None and [r.sequence for r in run.in_flight.rows] == [row]
    assert run.residency.pins[row.request.namespace, "a"] == 1, "its adapter is still being read"
    assert row.block_table == [] and row.token_ids == alone.token_ids[:6]
    run.run()
    run.check_idle()


def test_a_block_is_published_only_once_its_tokens_are_known(simulation: "SimulationType") -> None:
    run = simulation(overlap=True)
    row = run.submit(prompt(3), max_tokens=20)[0]
    while row.num_planned_tokens < 8:
        run.step()
    assert row.num_registered_blocks == 1, (
        "the second is full on the device, and its last token is on its way"
    )
    run.step()
    assert row.num_registered_blocks == 2
    run.run()
    again = run.submit(row.token_ids[:-1], max_tokens=1)[0]
    run.run()
    assert again.num_cached_tokens == 20 and again.token_ids == row.token_ids
    run.check_idle()


@pytest.mark.parametrize("steps", range(1, 6))
def test_an_abort_at_any_time_leaves_nothing(simulation: "SimulationType", steps: int) -> None:
    run = simulation(overlap=True, max_num_batched_tokens=8, max_num_seqs=4)
    run.submit(prompt(12), adapter="a", max_tokens=9, sampling={"n": 2}, request_id="gone")
    other = run.submit(prompt(3, 40), max_tokens=9)[0]
    for _ in range(steps):
        run.step()
    run.scheduler.abort("gone")
    run.check()
    again = run.submit(prompt(12), adapter="a", max_tokens=9, request_id="gone")[0]
    run.run()
    run.check_idle()
    assert (other.finish_reason, again.finish_reason) == ("length", "length")
    assert len(reported_tokens(run, other)) == len(reported_tokens(run, again)) == 9


def test_a_preempted_row_samples_its_lost_token_again(simulation: "SimulationType") -> None:
    runs = [simulation(num_blocks=12, max_num_seqs=4, overlap=overlap) for overlap in (False, True)]
    for run in runs:
        for index in range(4):
            run.submit(prompt(8, 10 * index + 2), max_tokens=16)
        run.run()
        run.check_idle()
        assert run.scheduler.num_preemptions > 0
    assert streams(runs[0]) == streams(runs[1])


def test_a_broken_row_fails_alone(simulation: "SimulationType") -> None:
    run = simulation(overlap=True)
    rows = [run.submit(prompt(5, 10 * index + 2), max_tokens=9)[0] for index in range(3)]
    for _ in range(3):
        run.step()
    run.nan = {rows[1]}
    run.run()
    assert [s for s, _ in run.failures] == [rows[1]]
    assert [row.finish_reason for row in rows] == ["length", "abort", "length"]
    run.check_idle()


def test_a_late_mask_is_waited_for_while_a_step_is_in_flight(
    simulation: "SimulationType", scripted_mask: "type[ScriptedMask]"
) -> None:
    run = simulation(overlap=True)
    choices = run.submit(prompt(5), grammar=b"{}", max_tokens=20)
    run.give_mask(choices, scripted_mask([(5, 6, 7, 8)]))
    other = run.submit(prompt(5, 50), max_tokens=12)[0]
    for step in range(30):
        run.late = {choices[0]} if step % 3 else set()
        choices[0].awaits_mask &= step % 2 == 0
        run.step()
    run.run()
    assert choices[0].token_ids[5:] == [5, 6, 7, 8] and other.finish_reason == "length"
    run.check_idle()


def test_steps_are_completed_in_their_order(simulation: "SimulationType") -> None:
    run = simulation()
    run.submit(prompt(3))
    first = run.scheduler.schedule()
    assert first is not None
    run.scheduler.expect(first, [run.sequences[0]])
    second = run.scheduler.schedule()
    assert second is not None
    with pytest.raises(ValueError, match="in the order"):
        run.scheduler.complete(second, {})
    with pytest.raises(ValueError, match="not planned here"):
        simulation().scheduler.complete(first, {})
