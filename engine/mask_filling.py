"""`MaskFiller`: grammar masks filled on side threads while the device computes.

Invariant: a step waits for masks at most the patience it grants. A mask that is late is not lost: its row sits out until
it is there, or ends alone once the one mask has taken `timeout_s`; nobody else waits for it, or for its thread.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
from torch import Tensor

from loraplex.engine.errors import EngineError, GrammarFailed, GrammarTooSlow
from loraplex.engine.sequence import Sequence, SequenceStatus
from loraplex.engine.side_thread import join_all, lower_priority, start_side_thread
from loraplex.engine.token_mask import TokenMask

MAX_THREADS = 4
"""A second one is started only when a mask holds up those behind it. More could not be told from a busy machine."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Countdown:
    """How many masks of one step are still to come."""

    remaining: int


@dataclass(slots=True, eq=False)
class _Fill:
    """One mask on its way. `row` is int32 [1, words]; `began` None: no thread has taken it up."""

    mask: TokenMask
    row: Tensor
    countdown: _Countdown
    began: float | None = None
    thread_id: int = 0
    seconds: float = 0.0
    done: bool = False
    abandoned: bool = False
    error: EngineError | None = None


@dataclass(slots=True)
class Masks:
    """Outcome of one step's masks by sequence. A sequence in neither is late."""

    rows: dict[Sequence, Tensor] = field(default_factory=dict)
    errors: dict[Sequence, EngineError] = field(default_factory=dict)


class MaskFiller:
    """Called by the step thread alone. Threads start with the first mask."""

    def __init__(
        self, vocab_size: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._words = (vocab_size + 31) // 32
        self._timeout_s = timeout_s
        self._clock = clock
        self._cores = os.sched_getaffinity(0)
        self._waiting: deque[_Fill] = deque()
        self._calls: SimpleQueue[bool] = SimpleQueue()
        self._arrived = threading.Condition()
        self._countdown = _Countdown(0)
        self._fills: dict[Sequence, _Fill] = {}
        self._free_rows: list[Tensor] = []
        self._threads: dict[int, threading.Thread] = {}
        self.seconds = 0.0
        self.num_late = 0

    @property
    def has_late(self) -> bool:
        """Whether a mask of an earlier step is still on its way or waits to be used."""
        return bool(self._fills)

    def begin(self, sequences: Iterable[Sequence]) -> None:
        """Have the masks of these sequences filled, those that were quick the last time first."""
        fresh = sorted((s for s in sequences if s not in self._fills), key=lambda s: s.mask_seconds)
        self._countdown = _Countdown(len(fresh))
        for sequence in fresh:
            if sequence.token_mask is None:
                raise ValueError("a sequence without a grammar has no mask")
            fill = _Fill(sequence.token_mask, self._row(), self._countdown)
            self._fills[sequence] = fill
        # All at once, and one call: a thread woken for the first would take the interpreter from the rest.
        self._waiting.extend(self._fills[sequence] for sequence in fresh)
        if fresh and self._threads:
            self._calls.put(True)
        elif fresh:
            self._start_thread()

    def collect(self, sequences: Iterable[Sequence], patience_s: float) -> Masks:
        """The masks of these sequences, all begun before. Waits at most `patience_s`; rows are valid until `give_back`."""
        countdown = self._countdown
        with self._arrived:
            self._arrived.wait_for(lambda: not countdown.remaining, patience_s)
        masks = Masks()
        for sequence in sequences:
            fill = self._fills[sequence]
            if not self._is_settled(fill):
                self.num_late += 1
                continue
            del self._fills[sequence]
            sequence.mask_seconds = fill.seconds
            self.seconds += fill.seconds
            if fill.error is not None:
                masks.errors[sequence] = fill.error
            else:
                masks.rows[sequence] = fill.row
        if countdown.remaining:
            self._relieve()
        return masks

    def give_back(self, masks: Masks) -> None:
        """The rows of `masks` have been read."""
        self._free_rows.extend(masks.rows.values())

    def poll(self) -> list[Sequence]:
        """The sequences whose late mask has come, or has failed as `collect` will tell; those that ended are forgotten."""
        settled = [sequence for sequence, fill in self._fills.items() if self._is_settled(fill)]
        for sequence in settled:
            if sequence.status is SequenceStatus.FINISHED:
                del self._fills[sequence]
        return settled

    def close(self) -> None:
        """Let the threads end after what they are at."""
        for _ in self._threads:
            self._calls.put(False)
        join_all(self._threads.values())

    def _row(self) -> Tensor:
        return self._free_rows.pop() if self._free_rows else torch.zeros(1, self._words, dtype=torch.int32)

    def _is_settled(self, fill: _Fill) -> bool:
        """True once there is a mask or an error. A thread that took too long is left to itself."""
        if fill.done or fill.error is not None:
            return True
        if fill.began is None or self._clock() - fill.began <= self._timeout_s:
            return False
        with self._arrived:
            if fill.done:
                return True
            fill.abandoned = True
            fill.countdown.remaining -= 1
        fill.seconds = self._timeout_s
        fill.error = GrammarTooSlow(
            f"one mask of this request's grammar took longer than {self._timeout_s} s"
        )
        lower_priority(fill.thread_id, 19)
        del self._threads[fill.thread_id]
        self._relieve()
        return True

    def _relieve(self) -> None:
        """Have what waits behind a slow mask, now or in the next step, taken up by a new thread or by one that sleeps."""
        if len(self._threads) < MAX_THREADS:
            self._start_thread()
        else:
            self._calls.put(True)

    def _start_thread(self) -> None:
        thread = start_side_thread("mask-filling", self._run, self._cores)
        self._threads[thread.native_id or 0] = thread

    def _run(self) -> None:
        """Fill what waits, then wait for a call. A thread that was given up ends."""
        while True:
            try:
                fill = self._waiting.popleft()
            except IndexError:
                if not self._calls.get():
                    return
                continue
            if not self._fill(fill):
                return

    def _fill(self, fill: _Fill) -> bool:
        """False if it took so long that another thread is in this one's place."""
        fill.thread_id = threading.get_native_id()
        fill.began = began = self._clock()
        error = _attempt(fill)
        with self._arrived:
            if fill.abandoned:
                return False
            fill.seconds = self._clock() - began
            fill.error = error
            fill.done = True
            fill.countdown.remaining -= 1
            if not fill.countdown.remaining:
                self._arrived.notify_all()
        return True


def _attempt(fill: _Fill) -> EngineError | None:
    try:
        fill.mask.fill(fill.row, 0)
    except BaseException as error:
        # Panics of extension modules are no `Exception`.
        _logger.exception("a grammar's mask could not be filled")
        return GrammarFailed(f"the grammar's matcher broke down: {type(error).__name__}")
    return None
