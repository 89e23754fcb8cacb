"""`BitmaskFiller`: fills grammar masks on side threads while the device computes.

Invariant: a step waits for masks at most its timeout. A row with a late mask skips steps until the mask is ready, or ends
alone once that mask has taken `timeout_s`; no other row waits for it or for its thread. The step thread uses no mask of a
family while another mask of it is being filled, because it would wait for that one's lock. So the masks of a family are
started together and used together, and a row that joins meanwhile waits for the next round.
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
"""Processor time. A row whose masks take this long queues with the other slow rows."""

MIN_THREADS = 2
"""The second thread of a queue takes the masks behind a slow one, also where no core is free."""

MAX_SHARED = 4
"""Most threads that share the masks of a step. Measured on two busy cores, with a bare pool of threads, 64 usual masks: two threads
took 0.65 of the time of one at the 10th percentile (1.79 -> 1.17 ms with xgrammar, 2.03 -> 1.34 ms with llguidance)."""

SLOW_NICENESS = 10
"""Slow masks yield to the forward pass, which needs every core at once: they delay their own rows alone."""


@dataclass(slots=True)
class Masks:
    """Outcome of one step's masks by sequence. A sequence in neither is late."""

    rows: dict[Sequence, Tensor] = field(default_factory=dict)
    errors: dict[Sequence, EngineError] = field(default_factory=dict)


class BitmaskFiller:
    """Only the step thread calls it. Threads start with the first mask.

    First masks, whose cost is unknown, and masks of rows that were slow have threads of their own. In one queue with them,
    a mask that takes microseconds would wait for all of theirs.
    """

    def __init__(
        self,
        vocab_size: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        work_clock: Callable[[], float] = time.thread_time,
        free_cores: int = 0,
    ) -> None:
        """`work_clock` distinguishes slow masks from masks that a busy machine interrupted; it is read on their threads.

        `free_cores`: of this machine, beside those that compute the steps.
        """
        self._words = (vocab_size + 31) // 32
        self._timeout_s = timeout_s
        self._clock = clock
        self._arrived = threading.Condition()
        cores = os.sched_getaffinity(0)
        shared = min(max(free_cores, 1), MAX_SHARED)
        self._first, self._quick, self._slow = (
            BitmaskThreads(
                self._arrived,
                cores,
                clock,
                work_clock,
                at_once=at_once,
                most=max(at_once, MIN_THREADS),
                niceness=niceness,
            )
            for at_once, niceness in ((shared, 0), (shared, 0), (1, SLOW_NICENESS))
        )
        self._countdown = Countdown(0)
        self._jobs: dict[Sequence, BitmaskJob] = {}
        self._postponed: set[Sequence] = set()
        self._stuck: list[BitmaskJob] = []
        self._free_rows: list[Tensor] = []
        self.seconds = 0.0
        self.num_late = 0

    @property
    def has_late(self) -> bool:
        """Whether a mask of an earlier step is still being filled or waits to be used."""
        return bool(self._jobs or self._postponed)

    def begin(self, sequences: Collection[Sequence]) -> None:
        """Start filling the masks of these sequences, except those that are being filled already.

        May be called several times before `collect`, which waits for all of them.
        """
        used = {self._jobs[sequence].mask.family for sequence in sequences if sequence in self._jobs}
        taken = used | self._pending_families()
        missing = [sequence for sequence in sequences if sequence not in self._jobs]
        fresh = [sequence for sequence in missing if _family(sequence) not in taken]
        self._postponed.difference_update(fresh)
        self._postponed.update(sequence for sequence in missing if _family(sequence) in taken)
        stuck = self._stuck_families()
        jobs = [self._new_job(sequence, stuck) for sequence in fresh]
        self._jobs.update(zip(fresh, jobs, strict=True))
        jobs = [job for job in jobs if job.error is None]
        with self._arrived:
            self._countdown.remaining += sum(job.countdown is self._countdown for job in jobs)
        for threads in (self._quick, self._first, self._slow):
            threads.put([job for job in jobs if job.threads is threads])

    def collect(self, sequences: Collection[Sequence], timeout_s: float) -> Masks:
        """Return the masks of these sequences, all given to `begin` before; rows are valid until `give_back`.

        Waits at most `timeout_s`, and not at all for masks of rows that were slow before.
        """
        countdown, self._countdown = self._countdown, Countdown(0)
        with self._arrived:
            self._arrived.wait_for(lambda: not countdown.remaining, timeout_s)
        masks = Masks()
        stalled: set[BitmaskThreads] = set()
        started = [sequence for sequence in sequences if sequence in self._jobs]
        self.num_late += len(sequences) - len(started)
        settled = {sequence: self._is_settled(self._jobs[sequence]) for sequence in started}
        busy = self._busy_families()
        for sequence in started:
            job = self._jobs[sequence]
            if not settled[sequence]:
                stalled.add(job.threads)
            if not settled[sequence] or _must_wait(job, busy):
                self.num_late += 1
                continue
            del self._jobs[sequence]
            # A decaying maximum: one fast mask among slow ones does not make a row fast.
            sequence.mask_seconds = max(job.seconds, (sequence.mask_seconds or 0.0) / 2)
            self.seconds += job.seconds
            if job.error is not None:
                masks.errors[sequence] = job.error
            else:
                masks.rows[sequence] = job.row
        for threads in stalled:
            threads.relieve()
        return masks

    def give_back(self, masks: Masks) -> None:
        """Reuse the rows of `masks`, which have been read."""
        self._free_rows.extend(masks.rows.values())

    def poll(self) -> list[Sequence]:
        """Return the sequences whose late mask is ready or has failed (`collect` reports which); ended ones are forgotten."""
        settled = [sequence for sequence, job in self._jobs.items() if self._is_settled(job)]
        busy = self._busy_families()
        settled = [sequence for sequence in settled if not _must_wait(self._jobs[sequence], busy)]
        for sequence in settled:
            if sequence.status is SequenceStatus.FINISHED:
                del self._jobs[sequence]
        pending = self._pending_families()
        free = {sequence for sequence in self._postponed if _family(sequence) not in pending}
        self._postponed -= free
        return [*settled, *free]

    def close(self) -> None:
        """End the threads after their current masks."""
        join_all([*self._quick.close(), *self._first.close(), *self._slow.close()])

    def _new_job(self, sequence: Sequence, stuck: set[object]) -> BitmaskJob:
        if sequence.token_mask is None:
            raise ValueError("a sequence without a grammar has no mask")
        threads = self._threads_for(sequence.mask_seconds)
        awaited = Countdown(1) if threads is self._slow else self._countdown
        namespace = sequence.request.namespace
        job = BitmaskJob(namespace, sequence.token_mask, self._row(), awaited, threads)
        if sequence.token_mask.family in stuck:
            job.error = GrammarTooSlow("a mask of this request's grammar never came to an end")
        return job

    def _threads_for(self, seconds: float | None) -> BitmaskThreads:
        if seconds is None:
            return self._first
        return self._quick if seconds < SLOW_S else self._slow

    def _row(self) -> Tensor:
        return self._free_rows.pop() if self._free_rows else torch.zeros(1, self._words, dtype=torch.int32)

    def _busy_families(self) -> set[object]:
        """Families with a mask that is being filled or queued, whether or not a row still waits for it."""
        return self._pending_families() | self._stuck_families()

    def _pending_families(self) -> set[object]:
        """Families with a row whose mask is not ready."""
        return {job.mask.family for job in self._jobs.values() if not job.done and job.error is None}

    def _stuck_families(self) -> set[object]:
        """Families with an abandoned mask that is still being filled."""
        self._stuck = [job for job in self._stuck if not job.done]
        return {job.mask.family for job in self._stuck}

    def _is_settled(self, job: BitmaskJob) -> bool:
        """True once there is a mask or an error. Abandons a thread that takes too long."""
        if job.done or job.error is not None:
            return True
        if job.began is None or self._clock() - job.began <= self._timeout_s:
            return False
        if job.threads.give_up(job):
            self._stuck.append(job)
            job.seconds = self._timeout_s
            job.error = GrammarTooSlow(
                f"one mask of this request's grammar took longer than {self._timeout_s} s"
            )
        return True


def _family(sequence: Sequence) -> object:
    return None if sequence.token_mask is None else sequence.token_mask.family


def _must_wait(job: BitmaskJob, busy: set[object]) -> bool:
    """Whether the step thread would wait for another mask's thread when it used this one. A failed mask is not used."""
    return job.error is None and job.mask.family in busy
