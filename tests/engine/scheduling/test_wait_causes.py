"""Why a request waited before its first step: the limit of the batch, who stood before it and who went first, its adapter."""

from typing import TYPE_CHECKING

from loraplex.engine.messages import NO_CAUSES, WaitCauses

if TYPE_CHECKING:
    from tests.engine.conftest import Simulation

    SimulationType = type[Simulation]


def prompt(length: int, start: int = 2) -> list[int]:
    return list(range(start, start + length))


def test_rows(simulation: "SimulationType") -> None:
    run = simulation(max_num_seqs=2)
    first = [run.submit(prompt(5, 40 * index), max_tokens=6)[0] for index in range(2)]
    run.step()
    queued = [run.submit(prompt(5, 40 * index), max_tokens=6)[0] for index in range(2, 5)]
    run.run()
    assert [each.causes for each in first] == [NO_CAUSES, WaitCauses(queued_before=1)]
    assert [each.causes.queued_before for each in queued] == [0, 1, 2]
    assert {each.causes.limit for each in queued} == {"rows"}
    assert {each.causes.overtaken_by for each in queued} == {0}
    run.check_idle()


def test_tokens(simulation: "SimulationType") -> None:
    run = simulation(max_num_seqs=4, max_num_batched_tokens=16)
    run.submit(prompt(60), max_tokens=1)
    run.step()
    late = run.submit(prompt(5, 100), max_tokens=1)[0]
    run.run()
    assert late.causes == WaitCauses(limit="tokens")


def test_kv_blocks(simulation: "SimulationType") -> None:
    run = simulation(max_num_seqs=8, num_blocks=16, prefix_caching=False)
    run.submit(prompt(40), max_tokens=10)
    run.step()
    late = run.submit(prompt(30, 200), max_tokens=1)[0]
    run.run()
    assert late.causes == WaitCauses(limit="kv_blocks")


def test_a_request_that_waits_for_the_running_step_alone_has_no_limit(simulation: "SimulationType") -> None:
    run = simulation(max_num_seqs=4)
    run.submit(prompt(5), max_tokens=8)
    run.step()
    late = run.submit(prompt(5, 50), max_tokens=2)[0]
    run.run()
    assert late.causes == NO_CAUSES


def test_later_requests_of_a_tenant_with_less_service_go_first(simulation: "SimulationType") -> None:
    run = simulation(max_num_seqs=1)
    run.submit(prompt(40), tenant="a", max_tokens=10)
    run.step()
    waits = run.submit(prompt(40, 50), tenant="a", max_tokens=2)[0]
    others = [run.submit(prompt(3, 100 * index), tenant="b", max_tokens=2)[0] for index in range(1, 4)]
    run.run()
    first = max(each.admitted_at or 0.0 for each in others)
    assert waits.admitted_at is not None and waits.admitted_at > first
    assert waits.causes == WaitCauses(limit="rows", overtaken_by=3)
    assert others[-1].causes == WaitCauses(limit="rows", queued_before=3)


def test_an_adapter_from_the_disk_beside_another_load(simulation: "SimulationType") -> None:
    run = simulation(residency={"load_s": 1.0, "budget": 4})
    run.submit(prompt(5), adapter="a", max_tokens=1)
    run.step()
    late = run.submit(prompt(5, 50), adapter="b", max_tokens=1)[0]
    run.run()
    again = run.submit(prompt(5, 90), adapter="b", max_tokens=1)[0]
    run.run()
    assert late.adapter_s >= 1.0
    assert late.causes == WaitCauses(adapter_tier="disk", adapter_bytes=1 << 20, loads_before=1)
    assert again.causes == NO_CAUSES and again.adapter_s == 0.0


def test_an_adapter_that_waits_for_a_place_in_the_batch(simulation: "SimulationType") -> None:
    run = simulation(max_adapters_per_step=1, residency={"budget": 4})
    run.submit(prompt(5, 50), adapter="b", max_tokens=1)
    run.run()
    run.submit(prompt(5), adapter="a", max_tokens=5)
    run.step()
    late = run.submit(prompt(5, 90), adapter="b", max_tokens=1)[0]
    run.run()
    assert (late.causes.adapter_tier, late.causes.loads_before) == ("device", 0)
