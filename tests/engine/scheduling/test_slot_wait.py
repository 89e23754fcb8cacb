"""The wait of a tenant without a row in the batch is bounded, whatever the others run, driven through the simulated engine."""

from typing import TYPE_CHECKING

import pytest

from loraplex.engine.batch.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from tests.engine.conftest import Simulation

    SimulationType = type[Simulation]


def prompt(length: int, start: int = 2) -> list[int]:
    return list(range(start, start + length))


def fill(run: "Simulation", tenant: str, count: int, max_tokens: int = 150) -> None:
    """Submit `count` long responses of a tenant and let them begin."""
    for start in range(count):
        run.submit(prompt(5, 10 * start + 2), tenant=tenant, max_tokens=max_tokens)
    run.step()
    run.step()


def first_token_s(run: "Simulation", *sequences: Sequence) -> float:
    """Run until one of the sequences has its first token; return the seconds since its submission."""
    for _ in range(400):
        run.step()
        if times := [run.first_token_at[s] - s.arrival for s in sequences if s in run.first_token_at]:
            return min(times)
    raise AssertionError("no first token after 400 steps")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_batch_full_of_one_tenants_long_responses_does_not_keep_others_out(
    simulation: "SimulationType", overlap: bool
) -> None:
    run = simulation(max_num_seqs=4, num_blocks=400, overlap=overlap)
    alone = simulation(max_num_seqs=4, num_blocks=400, overlap=overlap)
    for each in (run, alone):
        for start in range(8):
            each.submit(prompt(5, 10 * start + 2), tenant="a", max_tokens=200)
    for _ in range(3):
        run.step()
    others = [run.submit(prompt(3, 90), tenant=tenant, max_tokens=3)[0] for tenant in "bcd"]
    run.submit(prompt(3, 90), tenant="b", max_tokens=3)
    while any(other.finish_reason is None for other in others):
        run.step()
    assert run.now < 3.0, "seconds: one until a row gives way, and a few steps"
    assert 1 <= run.scheduler.num_preemptions <= 3
    run.run()
    alone.run()
    assert [s.token_ids for s in run.sequences[:8]] == [s.token_ids for s in alone.sequences]
    run.check_idle()


def test_blocks_of_long_contexts_do_not_keep_others_out(simulation: "SimulationType") -> None:
    run = simulation(max_num_seqs=8, num_blocks=130, max_num_batched_tokens=400, max_model_len=300)
    for start in range(2):
        run.submit(prompt(200, 200 * start + 2), tenant="a", max_tokens=60)
    run.step()
    other = run.submit(prompt(140, 500), tenant="b", max_tokens=3)[0]
    while other.finish_reason is None:
        run.step()
    assert run.now < 3.0
    run.run()
    run.check_idle()


def test_the_only_row_of_a_tenant_keeps_its_place(simulation: "SimulationType") -> None:
    run = simulation(max_num_seqs=2)
    for tenant in "abc":
        run.submit(prompt(5), tenant=tenant, max_tokens=50)
    run.run()
    assert run.scheduler.num_preemptions == 0
    run.check_idle()


def test_adapters_evicted_while_the_batch_is_full_are_loaded_again(simulation: "SimulationType") -> None:
    run = simulation(max_num_seqs=4, num_blocks=400, residency={"budget": 2, "load_s": 0.3})
    fill(run, "a", 8)
    others = [run.submit(prompt(3), tenant="b", adapter=digest, max_tokens=3)[0] for digest in "wxyz"]
    assert first_token_s(run, *others) < 3.0, "seconds: one of waiting, two loads and a few steps"
    run.run()
    run.check_idle()


def test_a_tenant_with_a_row_is_not_in_the_way_of_one_without(
    simulation: "SimulationType",
) -> None:
    run = simulation(max_num_seqs=4, num_blocks=400, residency={"load_s": 5.0})
    run.submit(prompt(5, 70), tenant="c", max_tokens=200)
    fill(run, "a", 8, max_tokens=200)
    for start in range(4):
        run.submit(prompt(5, 80 + start), tenant="c", max_tokens=200)
    other = run.submit(prompt(3), tenant="b", adapter="slow", max_tokens=3)[0]
    assert first_token_s(run, other) < 7.0, "seconds: five of loading, one of waiting and a few steps"
    assert run.scheduler.num_preemptions == 2
    run.run()
    run.check_idle()


def test_tenants_that_have_just_come_are_not_in_the_way_of_one_that_waits(
    simulation: "SimulationType",
) -> None:
    run = simulation(max_num_seqs=4, num_blocks=400, residency={"load_s": 5.0})
    fill(run, "a", 8, max_tokens=240)
    other = run.submit(prompt(3), tenant="b", adapter="slow", max_tokens=3)[0]
    while other not in run.first_token_at:
        fresh = run.submit(prompt(2, 40), tenant=f"fresh {len(run.sequences)}")[0]
        for _ in range(5):
            run.step()
        run.scheduler.abort(fresh.request_id)
        assert run.now < 7.5, "seconds: five of loading, one of waiting and a few steps"
    run.run()
    run.check_idle()


def test_nothing_is_preempted_for_a_prompt_that_would_not_fit(simulation: "SimulationType") -> None:
    run = simulation(max_num_seqs=4, num_blocks=130, max_num_batched_tokens=512, max_model_len=512)
    run.submit(prompt(200, 600), tenant="c", max_tokens=100)
    fill(run, "a", 3, max_tokens=200)
    large = run.submit(prompt(400), tenant="b", max_tokens=3)[0]
    for _ in range(60):
        run.step()
    assert (run.scheduler.num_running, run.scheduler.num_preemptions) == (4, 0)
    assert first_token_s(run, large) < 12.0, "seconds: when the row of many blocks has ended"
    run.run()
    run.check_idle()


def test_blocks_shared_by_choices_that_wait_are_given_back(simulation: "SimulationType") -> None:
    run = simulation(max_num_seqs=2, num_blocks=60, max_num_batched_tokens=256)
    for start in (2, 200):
        run.submit(prompt(90, start), tenant="a", max_tokens=60, sampling={"n": 3})
    run.step()
    other = run.submit(prompt(100, 500), tenant="b", max_tokens=3)[0]
    assert first_token_s(run, other) < 3.0
    run.run()
    run.check_idle()


def test_the_newest_row_gives_way_although_older_ones_have_another_weight(
    simulation: "SimulationType",
) -> None:
    run = simulation(max_num_seqs=3, num_blocks=400)
    rows = [
        run.submit(prompt(5, 10 * weight), tenant="a", max_tokens=100, weight=float(weight))[0]
        for weight in (1, 1, 4)
    ]
    run.step()
    other = run.submit(prompt(3), tenant="b", max_tokens=50)[0]
    assert first_token_s(run, other) < 3.0
    assert [row.status for row in rows] == [SequenceStatus.RUNNING] * 2 + [SequenceStatus.WAITING]
    run.run()
    run.check_idle()
