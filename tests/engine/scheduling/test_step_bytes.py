"""What steps read: the weights once, the context of each row, each adapter of the rows once."""

from typing import TYPE_CHECKING

from loraplex.engine.messages import AdapterRef
from loraplex.engine.scheduling.step_bytes import StepBytes

if TYPE_CHECKING:
    from tests.engine.conftest import Simulation

SIZES = {"x": 100, "y": 30}


def size(adapter: AdapterRef) -> int:
    return SIZES[adapter.digest]


def counted_of(run: "Simulation") -> tuple[StepBytes, int]:
    """Run to the end; also the number of steps."""
    counted, steps = StepBytes(1000, 3, size), 0
    while run.is_busy:
        if (plan := run.step()) is not None:
            counted.count(plan)
            steps += 1
    return counted, steps


def test_a_step_reads_the_weights_and_the_context_of_each_row(simulation: "type[Simulation]") -> None:
    run = simulation(max_num_seqs=4)
    run.submit([2] * 20, max_tokens=3)
    run.submit([3] * 5, tenant="b", max_tokens=3)
    counted, steps = counted_of(run)
    # A prompt as it is computed, then the context with each further token, of which the last is sampled and never computed.
    assert (counted.weights, steps) == (3000, 3)
    assert counted.kv == 3 * (20 + 21 + 22 + 5 + 6 + 7)
    assert counted.adapters == 0


def test_an_adapter_of_many_rows_is_read_once_a_step(simulation: "type[Simulation]") -> None:
    run = simulation(max_num_seqs=4)
    for _ in range(2):
        run.submit([2] * 4, adapter="x", max_tokens=3)
    run.submit([2] * 4, adapter="y", max_tokens=2)
    counted, steps = counted_of(run)
    loaded_at_once = counted.weights // 1000
    assert loaded_at_once == steps and counted.adapters == 100 * 3 + 30 * 2
