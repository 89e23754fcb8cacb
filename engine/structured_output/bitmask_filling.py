"""`BitmaskFiller`: grammar masks filled on side threads while the device computes.

Invariant: a step waits for masks at most the timeout it grants. A mask that is late is not lost: its row sits out until
it is there, or ends alone once the one mask has taken `timeout_s`; nobody else waits for it, or for its thread. No mask
of a family is in the step thread's hands while another of it is being filled: it would wait for that one's lock. So the masks
of a family are begun together and used together, and who joins meanwhile waits for the next time.
"""

import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loraplex.engine.batch.sequence import Sequence, SequenceStatus
from loraplex.engine.errors import EngineError, GrammarTooSlow
from loraplex.engine.structured_output.bitmask_threads import BitmaskJob, BitmaskThreads, Countdown
from loraplex.engine.threads import join_all

SLOW_S = 0.005
"""Processor time. A row whose masks take this long queues with the other slow ones."""

SLOW_LANE_NICENESS = 10
"""Slow masks give way to the forward pass, which needs every core at once: they hold up their own rows alone."""


@dataclass(slots=True)
class Masks:
    """Outcome of one step's masks by sequence. A sequence in neither is late."""

    rows: dict[Sequence, Tensor] = field(default_factory=dict)
    errors: dict[Sequence, EngineError] = field(default_factory=dict)


class BitmaskFiller:
    """Called by the step thread alone. Threads start with the first mask.

    First masks, of which nothing is known, and those of rows whose masks were slow have lanes of their own: in one lane
    with them, a mask that takes microseconds would wait for all of theirs.
    """

    def __init__(
        self,
        vocab_size: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`work_clock` tells slow masks from those that a busy machine interrupted; it is read on their threads."""
        self._words = (vocab_size + 31) // 32
        self._timeout_s = timeout_s
        self._clock = clock
        self._arrived = threading.Condition()
        cores = os.sched_getaffinity(0)
        self._first, self._quick, self._slow = (
            BitmaskThreads(self._arrived, cores, clock, work_clock, niceness)
            for niceness in (0, 0, SLOW_LANE_NICENESS)
        )
        self._countdown = Countdown(0)
        self._fills: dict[Sequence, BitmaskJob] = {}
        self._held_back: set[Sequence] = set()
        self._stuck: list[BitmaskJob] = []
        self._free_rows: list[Tensor] = []
        self.seconds = 0.0
        self.num_late = 0

    @property
    def has_late(self) -> bool:
        """Whether a mask of an earlier step is still on its way or waits to be used."""
        return bool(self._fills or self._held_back)

    def begin(self, sequences: Collection[Sequence]) -> None:
        """Have the masks of these sequences filled, but for those that are on their way."""
        used = {self._fills[sequence].mask.family for sequence in sequences if sequence in self._fills}
        taken = used | self._pending_families()
        missing = [sequence for sequence in sequences if sequence not in self._fills]
        fresh = [sequence for sequence in missing if _family(sequence) not in taken]
        self._held_back.difference_update(fresh)
        self._held_back.update(sequence for sequence in missing if _family(sequence) in taken)
        self._countdown = Countdown(0)
        stuck = self._stuck_families()
        fills = [self._new_fill(sequence, stuck) for sequence in fresh]
        self._fills.update(zip(fresh, fills, strict=True))
        fills = [fill for fill in fills if fill.error is None]
        self._countdown.remaining = sum(fill.countdown is self._countdown for fill in fills)
        for lane in (self._quick, self._first, self._slow):
            lane.put([fill for fill in fills if fill.lane is lane])

    def collect(self, sequences: Collection[Sequence], timeout_s: float) -> Masks:
        """The masks of these sequences, all given to `begin` before; rows are valid until `give_back`.

        Waits at most `timeout_s`, and for none of those that were slow before.
        """
        countdown = self._countdown
        with self._arrived:
            self._arrived.wait_for(lambda: not countdown.remaining, timeout_s)
        masks = Masks()
        held_up: set[BitmaskThreads] = set()
        begun = [sequence for sequence in sequences if sequence in self._fills]
        self.num_late += len(sequences) - len(begun)
        settled = {sequence: self._is_settled(self._fills[sequence]) for sequence in begun}
        busy = self._busy_families()
        for sequence in begun:
            fill = self._fills[sequence]
            if not settled[sequence]:
                held_up.add(fill.lane)
            if not settled[sequence] or _must_wait(fill, busy):
                self.num_late += 1
                continue
            del self._fills[sequence]
            # An average of sorts: one quick mask among slow ones makes no quick row.
            sequence.mask_seconds = max(fill.seconds, (sequence.mask_seconds or 0.0) / 2)
            self.seconds += fill.seconds
            if fill.error is not None:
                masks.errors[sequence] = fill.error
            else:
                masks.rows[sequence] = fill.row
        for lane in held_up:
            lane.relieve()
        return masks

    def give_back(self, masks: Masks) -> None:
        """The rows of `masks` have been read."""
        self._free_rows.extend(masks.rows.values())

    def poll(self) -> list[Sequence]:
        """The sequences whose late mask has come, or has failed as `collect` will tell; those that ended are forgotten."""
        settled = [sequence for sequence, fill in self._fills.items() if self._is_settled(fill)]
        busy = self._busy_families()
        settled = [sequence for sequence in settled if not _must_wait(self._fills[sequence], busy)]
        for sequence in settled:
            if sequence.status is SequenceStatus.FINISHED:
                del self._fills[sequence]
        pending = self._pending_families()
        free = {sequence for sequence in self._held_back if _family(sequence) not in pending}
        self._held_back -= free
        return [*settled, *free]

    def close(self) -> None:
        """Let the threads end after what they are at."""
        join_all([*self._quick.close(), *self._first.close(), *self._slow.close()])

    def _new_fill(self, sequence: Sequence, stuck: set[object]) -> BitmaskJob:
        if sequence.token_mask is None:
            raise ValueError("a sequence without a grammar has no mask")
        lane = self._lane(sequence.mask_seconds)
        awaited = Countdown(1) if lane is self._slow else self._countdown
        fill = BitmaskJob(sequence.token_mask, self._row(), awaited, lane)
        if sequence.token_mask.family in stuck:
            fill.error = GrammarTooSlow("a mask of this request's grammar never came to an end")
        return fill

    def _lane(self, seconds: float | None) -> BitmaskThreads:
        if seconds is None:
            return self._first
        return self._quick if seconds < SLOW_S else self._slow

    def _row(self) -> Tensor:
        return self._free_rows.pop() if self._free_rows else torch.zeros(1, self._words, dtype=torch.int32)

    def _busy_families(self) -> set[object]:
        """Families of which some mask is being filled, or about to be, whoever still waits for it."""
        return self._pending_families() | self._stuck_families()

    def _pending_families(self) -> set[object]:
        """Families of which a row's mask is on its way."""
        return {fill.mask.family for fill in self._fills.values() if not fill.done and fill.error is None}

    def _stuck_families(self) -> set[object]:
        """Families of which a mask was given up and is still being filled."""
        self._stuck = [fill for fill in self._stuck if not fill.done]
        return {fill.mask.family for fill in self._stuck}

    def _is_settled(self, fill: BitmaskJob) -> bool:
        """True once there is a mask or an error. A thread that took too long is left to itself."""
        if fill.done or fill.error is not None:
            return True
        if fill.began is None or self._clock() - fill.began <= self._timeout_s:
            return False
        if fill.lane.give_up(fill):
            self._stuck.append(fill)
            fill.seconds = self._timeout_s
            fill.error = GrammarTooSlow(
                f"one mask of this request's grammar took longer than {self._timeout_s} s"
            )
        return True


def _family(sequence: Sequence) -> object:
    return None if sequence.token_mask is None else sequence.token_mask.family


def _must_wait(fill: BitmaskJob, busy: set[object]) -> bool:
    """Whether the step thread would wait for another mask's thread when it used this one. A failed one is not used."""
    return fill.error is None and fill.mask.family in busy
