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
from loraplex.engine.structured_output.bitmask_filling import (
    MAX_SHARED,
    MIN_THREADS,
    SLOW_S,
    BitmaskFiller,
    Masks,
)
from loraplex.engine.structured_output.bitmask_threads import JOBS_PER_THREAD

if TYPE_CHECKING:
    from tests.engine.conftest import ScriptedMask

    MaskType = type[ScriptedMask]

VOCAB = 70
LONG_S = 60.0


class Blocked:
    """A mask that is filled once `gate` is open."""

    def __init__(self, family: object = None) -> None:
        self.gate = threading.Event()
        self.began = threading.Event()
        self.family = family or self

    def fill(self, bitmask: torch.Tensor, row: int) -> None:
        self.began.set()
        assert self.gate.wait(60)
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
    """Every mask costs a microsecond of work here, on however busy a machine. None is given up."""
    made = BitmaskFiller(VOCAB, timeout_s=LONG_S, work_clock=ticking())
    yield made
    made.close()


class Clock:
    """Stands still until a test moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def clocked(clock: Clock) -> Iterator[BitmaskFiller]:
    """Gives up a mask that is not filled after a second of `clock`."""
    made = BitmaskFiller(VOCAB, timeout_s=1.0, clock=clock, work_clock=ticking())
    yield made
    made.close()


def ticking() -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: next(ticks) * 1e-6


def collect(filler: BitmaskFiller, rows: list[Sequence], timeout_s: float = LONG_S) -> Masks:
    filler.begin(rows)
    return filler.collect(rows, timeout_s)


def poll(filler: BitmaskFiller) -> list[Sequence]:
    deadline = time.monotonic() + 60
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


def test_the_masks_of_one_tenant_delay_those_of_another_by_one_each(filler: BitmaskFiller) -> None:
    filled: list[str] = []
    blocked = Blocked()
    names = [*(f"a{index}" for index in range(20)), "b0", "b1", "c0"]
    rows = [row(blocked, b"a"), *(row(Recorded(name, filled), name[:1].encode()) for name in names)]
    masks = collect(filler, rows, timeout_s=0.05)
    deadline = time.monotonic() + LONG_S
    while len(filled) < len(names):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert filled[:5] == ["b0", "c0", "a0", "b1", "a1"]
    assert rows[0] not in masks.rows
    blocked.gate.set()
    poll(filler)


def test_a_broken_mask_fails_its_row_alone(filler: BitmaskFiller, scripted_mask: "MaskType") -> None:
    broken, fine = row(scripted_mask([(5,)], broken="fill")), row(scripted_mask([(6,)]))
    masks = collect(filler, [broken, fine])
    assert isinstance(masks.errors[broken], GrammarFailed)
    assert tokens(masks.rows[fine]) == [6]


def test_a_late_mask_sits_out_while_others_go_on(filler: BitmaskFiller, scripted_mask: "MaskType") -> None:
    late, fine = row(slow := Blocked()), row(scripted_mask([(6,)] * 2))
    filler.begin([late])
    assert slow.began.wait(60)
    assert not filler.collect([late], 0.0).rows and filler.has_late
    for _ in range(3):
        began = time.monotonic()
        masks = collect(filler, [fine])
        assert set(masks.rows) == {fine} and time.monotonic() - began < LONG_S / 2
    assert filler.poll() == [] and filler.num_late == 1
    slow.gate.set()
    assert poll(filler) == [late]
    assert set(collect(filler, [late, fine]).rows) == {late, fine}
    assert not filler.has_late


def test_a_mask_whose_family_is_busy_sits_out_with_it(
    filler: BitmaskFiller, scripted_mask: "MaskType"
) -> None:
    """A call on it would wait for the other inside their library, and the step and all rows would wait with it."""
    late, sibling = row(slow := Blocked("shared")), row(scripted_mask([(6,)], family="shared"))
    other = row(scripted_mask([(7,)]))
    filler.begin([late, sibling])
    assert slow.began.wait(60) and not filler.collect([late, sibling], 0.0).rows
    assert set(collect(filler, [other]).rows) == {other}
    assert filler.poll() == []
    slow.gate.set()
    while len(woken := filler.poll()) < 2:
        time.sleep(0.001)
    assert set(woken) == {late, sibling} and set(collect(filler, woken).rows) == {late, sibling}


def test_who_joins_a_family_waits_until_those_before_have_used_their_masks(
    filler: BitmaskFiller, scripted_mask: "MaskType"
) -> None:
    """Else rows that are ready would sit out again for every new one."""
    first, second = (row(Blocked("shared")) for _ in range(2))
    for each in (first, second):
        each.token_mask.gate.set()  # type: ignore[union-attr]
    assert set(collect(filler, [first]).rows) == {first}
    held = row(slow := Blocked("shared"))
    filler.begin([first])
    while not filler.poll():
        time.sleep(0.001)
    filler.begin([first, held])
    assert set(filler.collect([first, held], LONG_S).rows) == {first}
    assert not slow.began.is_set() and filler.has_late and filler.poll() == [held]
    slow.gate.set()
    assert set(collect(filler, [held, first, second]).rows) == {held, first, second}


def test_a_family_gets_on_however_many_join_it(scripted_mask: "MaskType") -> None:
    """Steps as the scheduler makes them: rows sit out until they are polled, and with each step a new one comes."""
    filler = BitmaskFiller(VOCAB, timeout_s=LONG_S)
    old = row(scripted_mask([(5,)], family="shared"))
    running, sitting_out, used = [old], set[Sequence](), 0
    deadline = time.monotonic() + LONG_S
    while used < 8:
        assert time.monotonic() < deadline
        sitting_out.difference_update(filler.poll())
        running.append(row(scripted_mask([(6,)], slow_at={0: 0.003}, family="shared")))
        planned = [sequence for sequence in running if sequence not in sitting_out]
        rows = collect(filler, planned, 0.002).rows
        sitting_out.update(sequence for sequence in planned if sequence not in rows)
        used += old in rows
        running = [sequence for sequence in running if sequence is old or sequence not in rows]
        time.sleep(0.004)
    filler.close()


def test_an_abandoned_mask_ends_later_masks_of_its_family(
    clocked: BitmaskFiller, clock: Clock, scripted_mask: "MaskType"
) -> None:
    stuck, sibling = row(slow := Blocked("shared")), row(scripted_mask([(6,)], family="shared"))
    clocked.begin([stuck])
    assert slow.began.wait(60) and clocked.poll() == []
    clock.now += 2.0
    assert clocked.poll() == [stuck]
    assert isinstance(collect(clocked, [stuck], 0.0).errors[stuck], GrammarTooSlow)
    assert isinstance(collect(clocked, [sibling]).errors[sibling], GrammarTooSlow) and not clocked.has_late
    slow.gate.set()
    while clocked._stuck_families():
        time.sleep(0.001)
    assert set(collect(clocked, [sibling]).rows) == {sibling}


def test_no_step_waits_for_a_mask_that_was_slow_before(scripted_mask: "MaskType") -> None:
    filler = BitmaskFiller(VOCAB, timeout_s=LONG_S, work_clock=time.monotonic)
    slow = row(scripted_mask([(6, 7)], slow_at={0: 2 * SLOW_S}))
    assert slow in collect(filler, [slow]).rows
    began = time.monotonic()
    blocked = Blocked()
    slow.token_mask = blocked  # type: ignore[assignment]
    assert not collect(filler, [slow]).rows and time.monotonic() - began < LONG_S / 2
    blocked.gate.set()
    filler.close()


def test_quick_masks_do_not_wait_for_those_of_slow_rows(
    filler: BitmaskFiller, scripted_mask: "MaskType"
) -> None:
    quick, slow = row(scripted_mask([(5,)])), [row(Blocked()) for _ in range(12)]
    collect(filler, [quick])
    for sequence in slow:
        sequence.mask_seconds = 2 * SLOW_S
    assert set(collect(filler, [quick, *slow]).rows) == {quick}
    for _ in range(20):
        assert set(collect(filler, [quick]).rows) == {quick}, "12 masks are in front of it"
    for sequence in slow:
        mask: Any = sequence.token_mask
        mask.gate.set()


class Costly:
    """A mask that takes `seconds` of `clock`."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds, self.family = clock, seconds, self

    def fill(self, bitmask: torch.Tensor, row: int) -> None:
        self.clock.now += self.seconds
        bitmask[row] = -1


def test_a_row_is_quick_again_after_several_quick_masks(clock: Clock) -> None:
    filler = BitmaskFiller(VOCAB, timeout_s=LONG_S, work_clock=clock)
    mask: Any = Costly(clock, 4 * SLOW_S)
    changing = row(mask)
    collect(filler, [changing])
    mask.seconds = 0.0
    seconds = []
    for _ in range(3):
        while not collect(filler, [changing], 0.01).rows:
            poll(filler)
        seconds.append(changing.mask_seconds or 0.0)
    filler.close()
    assert seconds[0] >= 2 * SLOW_S and seconds[2] < SLOW_S


def test_a_stuck_mask_ends_its_row_and_its_thread_is_left_alone(
    clocked: BitmaskFiller, clock: Clock, scripted_mask: "MaskType"
) -> None:
    blocked = [Blocked() for _ in range(MIN_THREADS + 1)]
    stuck = [row(mask) for mask in blocked]
    fine = row(scripted_mask([(6,)]))
    clocked.begin([*stuck, fine])
    failed: dict[Sequence, Any] = {}
    deadline = time.monotonic() + LONG_S
    done = Masks()
    waiting = [*stuck, fine]
    while waiting:
        assert time.monotonic() < deadline
        if sum(mask.began.is_set() for mask in blocked) > len(failed):
            clock.now += 2.0
        masks = clocked.collect(waiting, 0.01)
        failed |= masks.errors
        done.rows |= masks.rows
        waiting = [s for s in waiting if s not in masks.errors and s not in masks.rows]
    assert set(failed) == set(stuck)
    assert all(isinstance(error, GrammarTooSlow) for error in failed.values())
    assert tokens(done.rows[fine]) == [6]
    for mask in blocked:
        mask.gate.set()
    assert tokens(collect(clocked, [fine]).rows[fine]) == [6]


def test_a_row_that_ended_meanwhile_is_forgotten(filler: BitmaskFiller) -> None:
    late = row(slow := Blocked())
    assert not collect(filler, [late], 0.0).rows
    late.status = SequenceStatus.FINISHED
    slow.gate.set()
    poll(filler)
    assert not filler.has_late


def test_masks_are_filled_while_the_caller_computes(filler: BitmaskFiller, scripted_mask: "MaskType") -> None:
    rows = [row(scripted_mask([(5,)], slow_at={0: 0.02})) for _ in range(5)]
    filler.begin(rows)
    deadline = time.monotonic() + LONG_S
    while len(filler.poll()) < len(rows):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert len(filler.collect(rows, 0.0).rows) == 5


def test_a_sleeping_thread_takes_what_waits_behind_a_stuck_mask(
    filler: BitmaskFiller, scripted_mask: "MaskType"
) -> None:
    """All threads there may be have been started before, and are asleep."""
    gates = [row(Blocked()) for _ in range(MIN_THREADS)]
    for sequence in gates:
        collect(filler, [sequence], 0.01)
    for sequence in gates:
        mask: Any = sequence.token_mask
        mask.gate.set()
    filler.collect(gates, LONG_S)
    behind = row(scripted_mask([(6,)]))
    filler.begin([row(stuck := Blocked()), behind])
    deadline = time.monotonic() + 60
    while not filler.collect([behind], 0.01).rows:
        assert time.monotonic() < deadline
    stuck.gate.set()


class Together:
    """Masks that are filled only once `threads` of them are being filled at the same time."""

    def __init__(self, threads: int) -> None:
        self._barrier = threading.Barrier(threads)

    def row(self, tenant: bytes) -> Sequence:
        return row(Waiting(self._barrier), tenant)


class Waiting:
    """One of `Together`."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier
        self.family = self

    def fill(self, bitmask: torch.Tensor, row: int) -> None:
        self._barrier.wait(LONG_S)
        bitmask[row] = -1


@pytest.mark.parametrize(("free_cores", "threads"), [(3, 3), (64, MAX_SHARED)])
def test_free_cores_share_the_masks_of_a_step(free_cores: int, threads: int) -> None:
    before = threading.active_count()
    filler = BitmaskFiller(VOCAB, timeout_s=LONG_S, work_clock=ticking(), free_cores=free_cores)
    for _ in range(3):
        together = Together(threads)
        rows = [together.row(b"%d" % (number % 5)) for number in range(threads * JOBS_PER_THREAD)]
        for _ in range(2):
            masks = collect(filler, rows)
            assert masks.rows.keys() == set(rows) and not masks.errors
            filler.give_back(masks)
    assert threading.active_count() <= before + 2 * threads + 2
    filler.close()


def test_without_a_free_core_one_thread_fills_the_masks_of_a_step() -> None:
    """A CPU computes with all of its cores: a second thread would take one from the forward pass."""
    filler = BitmaskFiller(VOCAB, timeout_s=LONG_S, work_clock=ticking(), free_cores=0)
    filled: list[int] = []

    class Noted:
        def __init__(self) -> None:
            self.family = self

        def fill(self, bitmask: torch.Tensor, row: int) -> None:
            filled.append(threading.get_ident())

    rows = [row(Noted()) for _ in range(64)]
    for _ in range(3):
        assert not collect(filler, rows).errors
    filler.close()
    assert len(set(filled[:64])) == 1 and len(set(filled[64:])) == 1, "first masks have a thread of their own"


def test_a_few_masks_wake_one_thread() -> None:
    filler = BitmaskFiller(VOCAB, timeout_s=LONG_S, work_clock=ticking(), free_cores=8)
    before = threading.active_count()
    filled: list[str] = []
    collect(filler, [row(Recorded(str(number), filled)) for number in range(JOBS_PER_THREAD)])
    assert threading.active_count() == before + 1
    filler.close()


def test_closing_ends_every_thread_while_masks_wait() -> None:
    filler = BitmaskFiller(VOCAB, timeout_s=LONG_S, work_clock=ticking(), free_cores=4)
    before = threading.active_count()
    blocked = [Blocked() for _ in range(8 * JOBS_PER_THREAD)]
    filler.begin([row(mask) for mask in blocked])
    for mask in blocked:
        mask.gate.set()
    filler.close()
    assert threading.active_count() == before


def test_masks_that_began_earlier_in_a_step_are_waited_for(
    filler: BitmaskFiller, scripted_mask: "MaskType"
) -> None:
    early, later = row(slow := Blocked()), row(scripted_mask([(6,)]))
    filler.begin([early])
    assert slow.began.wait(LONG_S)
    filler.begin([early, later])
    threading.Timer(0.05, slow.gate.set).start()
    masks = filler.collect([early, later], LONG_S)
    assert masks.rows.keys() == {early, later} and filler.num_late == 0


def test_a_row_that_ended_after_its_mask_began_delays_no_later_step(
    filler: BitmaskFiller, scripted_mask: "MaskType"
) -> None:
    ended, fine = row(slow := Blocked()), row(scripted_mask([(6,)]))
    filler.begin([ended])
    ended.status = SequenceStatus.FINISHED
    filler.begin([fine])
    while not filler.collect([fine], 0.01).rows:
        assert not ended.mask_seconds, "no step asks for it"
    began = time.monotonic()
    assert tokens(collect(filler, [fine]).rows[fine]) == [6]
    assert time.monotonic() - began < LONG_S / 2
    slow.gate.set()
    poll(filler)
    assert not filler.has_late
