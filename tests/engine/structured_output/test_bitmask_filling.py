"""Masks filled on side threads: fast, late, stuck and broken masks affect only their own row."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from loraplex.engine.batch.sequence import Sequence, SequenceStatus
from loraplex.engine.errors import GrammarFailed, GrammarTooSlow
from loraplex.engine.messages import EngineRequest
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.structured_output.bitmask_filling import SLOW_S, BitmaskFiller, Masks
from loraplex.engine.structured_output.bitmask_threads import MAX_THREADS

if TYPE_CHECKING:
    from tests.engine.conftest import ScriptedMask

    MaskType = type[ScriptedMask]

VOCAB = 70
LONG_S = 10.0


class Blocked:
    """A mask that is filled once `gate` is open."""

    def __init__(self, family: object = None) -> None:
        self.gate = threading.Event()
        self.began = threading.Event()
        self.family = family or self

    def fill(self, bitmask: torch.Tensor, row: int) -> None:
        self.began.set()
        assert self.gate.wait(30)
        bitmask[row] = -1


class Recorded:
    """A mask that notes when it is filled."""

    def __init__(self, name: str, filled: list[str]) -> None:
        self.name, self.filled, self.family = name, filled, self

    def fill(self, bitmask: torch.Tensor, row: int) -> None:
        self.filled.append(self.name)
        bitmask[row] = -1


def row(mask: Any, tenant: bytes = b"") -> Sequence:
    request = EngineRequest(
        request_id="r", namespace=tenant, prompt_token_ids=[2], sampling=SamplingParams(max_tokens=9)
    )
    return Sequence(request, 0, 0.0, 0, [2], token_mask=mask)


def tokens(mask: torch.Tensor) -> list[int]:
    words = [word % (1 << 32) for word in mask.view(-1).tolist()]
    return [32 * i + b for i, word in enumerate(words) for b in range(32) if word >> b & 1]


@pytest.fixture
def filler() -> Iterator[BitmaskFiller]:
    """Every mask costs a microsecond of work here, on however busy a machine."""
    made = BitmaskFiller(VOCAB, timeout_s=0.3, work_clock=ticking())
    yield made
    made.close()


@pytest.fixture
def patient() -> Iterator[BitmaskFiller]:
    """As `filler`, and gives no mask up."""
    made = BitmaskFiller(VOCAB, timeout_s=30.0, work_clock=ticking())
    yield made
    made.close()


def ticking() -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: next(ticks) * 1e-6


def collect(filler: BitmaskFiller, rows: list[Sequence], timeout_s: float = LONG_S) -> Masks:
    filler.begin(rows)
    return filler.collect(rows, timeout_s)


def poll(filler: BitmaskFiller) -> list[Sequence]:
    deadline = time.monotonic() + 10
    while not (settled := filler.poll()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return settled


def test_every_row_gets_its_own_mask(filler: BitmaskFiller, scripted_mask: "MaskType") -> None:
    rows = [row(scripted_mask([(i,), (31,), (69,)])) for i in range(2, 20)]
    for _ in range(3):
        masks = collect(filler, rows)
        assert not masks.errors and not filler.has_late
        for i, sequence in enumerate(rows, start=2):
            assert tokens(masks.rows[sequence]) == [i, 31, 69]
        filler.give_back(masks)
    assert filler.seconds > 0 and filler.num_late == 0


def test_without_masks_there_is_no_thread() -> None:
    before = threading.active_count()
    filler = BitmaskFiller(VOCAB, timeout_s=1.0)
    assert collect(filler, []) == Masks() and threading.active_count() == before
    filler.close()


def test_a_grammar_whose_work_is_spent_ends_its_row_as_too_slow(
    filler: BitmaskFiller, scripted_mask: "MaskType"
) -> None:
    spent, fine = row(scripted_mask([(5,)], spent="fill")), row(scripted_mask([(6,)]))
    masks = collect(filler, [spent, fine])
    assert isinstance(masks.errors[spent], GrammarTooSlow) and fine in masks.rows


def test_the_masks_of_one_tenant_delay_those_of_another_by_one_each(patient: BitmaskFiller) -> None:
    filled: list[str] = []
    blocked = Blocked()
    names = [*(f"a{index}" for index in range(20)), "b0", "b1", "c0"]
    rows = [row(blocked, b"a"), *(row(Recorded(name, filled), name[:1].encode()) for name in names)]
    masks = collect(patient, rows, timeout_s=0.05)
    deadline = time.monotonic() + LONG_S
    while len(filled) < len(names):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert filled[:5] == ["b0", "c0", "a0", "b1", "a1"]
    assert rows[0] not in masks.rows
    blocked.gate.set()
    poll(patient)


def test_a_broken_mask_fails_its_row_alone(filler: BitmaskFiller, scripted_mask: "MaskType") -> None:
    broken, fine = row(scripted_mask([(5,)], broken="fill")), row(scripted_mask([(6,)]))
    masks = collect(filler, [broken, fine])
    assert isinstance(masks.errors[broken], GrammarFailed)
    assert tokens(masks.rows[fine]) == [6]


def test_a_late_mask_sits_out_while_others_go_on(patient: BitmaskFiller, scripted_mask: "MaskType") -> None:
    late, fine = row(slow := Blocked()), row(scripted_mask([(6,)] * 2))
    patient.begin([late])
    assert slow.began.wait(10)
    assert not patient.collect([late], 0.0).rows and patient.has_late
    for _ in range(3):
        began = time.monotonic()
        masks = collect(patient, [fine])
        assert set(masks.rows) == {fine} and time.monotonic() - began < LONG_S / 2
    assert patient.poll() == [] and patient.num_late == 1
    slow.gate.set()
    assert poll(patient) == [late]
    assert set(collect(patient, [late, fine]).rows) == {late, fine}
    assert not patient.has_late


def test_a_mask_whose_family_is_busy_sits_out_with_it(
    patient: BitmaskFiller, scripted_mask: "MaskType"
) -> None:
    """A call on it would wait for the other inside their library, and the step and all rows would wait with it."""
    late, sibling = row(slow := Blocked("shared")), row(scripted_mask([(6,)], family="shared"))
    other = row(scripted_mask([(7,)]))
    patient.begin([late, sibling])
    assert slow.began.wait(10) and not patient.collect([late, sibling], 0.0).rows
    assert set(collect(patient, [other]).rows) == {other}
    assert patient.poll() == []
    slow.gate.set()
    while len(woken := patient.poll()) < 2:
        time.sleep(0.001)
    assert set(woken) == {late, sibling} and set(collect(patient, woken).rows) == {late, sibling}


def test_who_joins_a_family_waits_until_those_before_have_used_their_masks(
    patient: BitmaskFiller, scripted_mask: "MaskType"
) -> None:
    """Else rows that are ready would sit out again for every new one."""
    first, second = (row(Blocked("shared")) for _ in range(2))
    for each in (first, second):
        each.token_mask.gate.set()  # type: ignore[union-attr]
    assert set(collect(patient, [first]).rows) == {first}
    held = row(slow := Blocked("shared"))
    patient.begin([first])
    while not patient.poll():
        time.sleep(0.001)
    patient.begin([first, held])
    assert set(patient.collect([first, held], LONG_S).rows) == {first}
    assert not slow.began.is_set() and patient.has_late and patient.poll() == [held]
    slow.gate.set()
    assert set(collect(patient, [held, first, second]).rows) == {held, first, second}


def test_a_family_gets_on_however_many_join_it(scripted_mask: "MaskType") -> None:
    """Steps as the scheduler makes them: rows sit out until they are polled, and with each step a new one comes."""
    filler = BitmaskFiller(VOCAB, timeout_s=10.0)
    old = row(scripted_mask([(5,)], family="shared"))
    running, sitting_out, used = [old], set[Sequence](), 0
    for _ in range(60):
        sitting_out.difference_update(filler.poll())
        running.append(row(scripted_mask([(6,)], slow_at={0: 0.003}, family="shared")))
        planned = [sequence for sequence in running if sequence not in sitting_out]
        rows = collect(filler, planned, 0.002).rows
        sitting_out.update(sequence for sequence in planned if sequence not in rows)
        used += old in rows
        running = [sequence for sequence in running if sequence is old or sequence not in rows]
        time.sleep(0.004)
    filler.close()
    assert used >= 8


def test_an_abandoned_mask_ends_later_masks_of_its_family(
    filler: BitmaskFiller, scripted_mask: "MaskType"
) -> None:
    stuck, sibling = row(slow := Blocked("shared")), row(scripted_mask([(6,)], family="shared"))
    filler.begin([stuck])
    assert poll(filler) == [stuck]
    assert isinstance(collect(filler, [stuck], 0.0).errors[stuck], GrammarTooSlow)
    assert isinstance(collect(filler, [sibling]).errors[sibling], GrammarTooSlow) and not filler.has_late
    slow.gate.set()
    while filler._stuck_families():
        time.sleep(0.001)
    assert set(collect(filler, [sibling]).rows) == {sibling}


def test_no_step_waits_for_a_mask_that_was_slow_before(scripted_mask: "MaskType") -> None:
    filler = BitmaskFiller(VOCAB, timeout_s=10.0, work_clock=time.monotonic)
    slow = row(scripted_mask([(6, 7)], slow_at={0: 2 * SLOW_S}))
    assert slow in collect(filler, [slow]).rows
    began = time.monotonic()
    blocked = Blocked()
    slow.token_mask = blocked  # type: ignore[assignment]
    assert not collect(filler, [slow]).rows and time.monotonic() - began < LONG_S / 2
    blocked.gate.set()
    filler.close()


def test_quick_masks_do_not_wait_for_those_of_slow_rows(scripted_mask: "MaskType") -> None:
    """Each of the slow ones stays below the timeout, so that none of them ever fails."""
    filler = BitmaskFiller(VOCAB, timeout_s=10.0, work_clock=time.monotonic)
    quick = row(scripted_mask([(5,)]))
    for _ in range(2):
        collect(filler, [quick])
    slow = [row(scripted_mask([(6,)], slow_at={0: 0.1})) for _ in range(12)]
    awaited: list[Sequence] = []
    arrived = 0
    for _ in range(20):
        ready = set(filler.poll())
        rows = [quick, *(s for s in slow if s not in awaited or s in ready)]
        masks = collect(filler, rows, 0.02)
        filler.give_back(masks)
        arrived += quick in masks.rows
        awaited = [s for s in slow if s in rows and s not in masks.rows or s in awaited and s not in rows]
    filler.close()
    assert arrived >= 18, "12 masks of 0.1 s each are in front of it"


def test_a_row_is_quick_again_after_several_quick_masks(scripted_mask: "MaskType") -> None:
    filler = BitmaskFiller(VOCAB, timeout_s=10.0, work_clock=time.monotonic)
    changing = row(scripted_mask([(5,)], slow_at={0: 4 * SLOW_S}))
    collect(filler, [changing])
    changing.token_mask = scripted_mask([(5,)])
    seconds = []
    for _ in range(3):
        while not collect(filler, [changing], 0.01).rows:
            poll(filler)
        seconds.append(changing.mask_seconds or 0.0)
    filler.close()
    assert seconds[0] >= 2 * SLOW_S and seconds[2] < SLOW_S


def test_a_stuck_mask_ends_its_row_and_its_thread_is_left_alone(
    filler: BitmaskFiller, scripted_mask: "MaskType"
) -> None:
    stuck = [row(Blocked()) for _ in range(MAX_THREADS + 1)]
    fine = row(scripted_mask([(6,)]))
    filler.begin([*stuck, fine])
    failed: dict[Sequence, Any] = {}
    began = time.monotonic()
    done = Masks()
    waiting = [*stuck, fine]
    while waiting:
        assert time.monotonic() - began < 10
        masks = filler.collect(waiting, 0.01)
        failed |= masks.errors
        done.rows |= masks.rows
        waiting = [s for s in waiting if s not in masks.errors and s not in masks.rows]
    assert set(failed) == set(stuck)
    assert all(isinstance(error, GrammarTooSlow) for error in failed.values())
    assert tokens(done.rows[fine]) == [6]
    for sequence in stuck:
        mask: Any = sequence.token_mask
        mask.gate.set()
    assert tokens(collect(filler, [fine]).rows[fine]) == [6]


def test_a_row_that_ended_meanwhile_is_forgotten(filler: BitmaskFiller) -> None:
    late = row(slow := Blocked())
    assert not collect(filler, [late], 0.0).rows
    late.status = SequenceStatus.FINISHED
    slow.gate.set()
    poll(filler)
    assert not filler.has_late


def test_masks_are_filled_while_the_caller_computes(
    filler: BitmaskFiller, scripted_mask: "MaskType", wait: Callable[[float], None] = time.sleep
) -> None:
    rows = [row(scripted_mask([(5,)], slow_at={0: 0.02})) for _ in range(5)]
    filler.begin(rows)
    wait(0.2)
    assert len(filler.collect(rows, 0.0).rows) == 5


def test_a_sleeping_thread_takes_what_waits_behind_a_stuck_mask(
    filler: BitmaskFiller, scripted_mask: "MaskType"
) -> None:
    """All threads there may be have been started before, and are asleep."""
    gates = [row(Blocked()) for _ in range(MAX_THREADS)]
    for sequence in gates:
        collect(filler, [sequence], 0.01)
    for sequence in gates:
        mask: Any = sequence.token_mask
        mask.gate.set()
    filler.collect(gates, LONG_S)
    behind = row(scripted_mask([(6,)]))
    filler.begin([row(Blocked()), behind])
    deadline = time.monotonic() + 5
    while not filler.collect([behind], 0.01).rows:
        assert time.monotonic() < deadline
