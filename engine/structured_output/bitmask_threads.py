"""`BitmaskThreads`: side threads that fill masks. Tenants take turns; those of one tenant are filled in their order.

Invariant: a thread whose mask takes too long is abandoned and replaced; its later output is never read.
"""

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from queue import SimpleQueue

from torch import Tensor

from loraplex.engine.errors import EngineError, GrammarFailed
from loraplex.engine.structured_output.tenant_queue import TenantQueue
from loraplex.engine.threads import lower_priority, start_side_thread
from loraplex.engine.token_mask import TokenMask

JOBS_PER_THREAD = 4
"""Masks that make another thread worth waking. Usual ones take 30 us each, and waking it takes the interpreter."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Countdown:
    """Number of masks of one step that are not ready yet."""

    remaining: int


@dataclass(slots=True, eq=False)
class BitmaskJob:
    """One mask to fill. `row` is int32 [1, words]; `began` None: no thread has started it; `seconds` is its processor
    time.
    """

    namespace: bytes
    mask: TokenMask
    row: Tensor
    countdown: Countdown
    threads: "BitmaskThreads"
    began: float | None = None
    thread_id: int = 0
    seconds: float = 0.0
    done: bool = False
    abandoned: bool = False
    error: EngineError | None = None


class BitmaskThreads:
    """Only the step thread calls it. `arrived` guards every `BitmaskJob` and is notified when a countdown reaches 0."""

    def __init__(
        self,
        arrived: threading.Condition,
        cores: set[int],
        clock: Callable[[], float],
        work_clock: Callable[[], float],
        *,
        at_once: int,
        most: int,
        niceness: int = 0,
    ) -> None:
        """`at_once`: threads that share the jobs of one step. Up to `most` start where a mask delays those behind it."""
        self._at_once = at_once
        self._most = most
        self._niceness = niceness
        self._arrived = arrived
        self._cores = cores
        self._clock = clock
        self._work_clock = work_clock
        self._lock = threading.Lock()
        self._waiting: TenantQueue[BitmaskJob] = TenantQueue()
        self._calls: SimpleQueue[bool] = SimpleQueue()
        self._threads: dict[int, threading.Thread] = {}

    def put(self, fills: Collection[BitmaskJob]) -> None:
        """Queue these jobs and let as many threads as they are worth share them.

        Threads are woken once all jobs wait: one woken for the first would take the interpreter from the rest.
        """
        with self._lock:
            for fill in fills:
                self._waiting.put(fill.namespace, fill)
        for number in range(min(-(-len(fills) // JOBS_PER_THREAD), self._at_once)):
            if number < len(self._threads):
                self._calls.put(True)
            else:
                self._start_thread()

    def relieve(self) -> None:
        """Let a new or an idle thread take the jobs that wait behind a slow mask, now or in the next step."""
        if len(self._threads) < self._most:
            self._start_thread()
        else:
            self._calls.put(True)

    def give_up(self, fill: BitmaskJob) -> bool:
        """Abandon the thread that fills this mask. False if the mask is ready after all."""
        with self._arrived:
            if fill.done:
                return False
            fill.abandoned = True
            fill.countdown.remaining -= 1
        lower_priority(fill.thread_id, 19)
        del self._threads[fill.thread_id]
        self.relieve()
        return True

    def close(self) -> list[threading.Thread]:
        """Let the threads end after their current masks; return them."""
        for _ in self._threads:
            self._calls.put(False)
        return list(self._threads.values())

    def _start_thread(self) -> None:
        thread = start_side_thread("mask-filling", self._run, self._cores, self._niceness)
        self._threads[thread.native_id or 0] = thread

    def _run(self) -> None:
        """Fill queued masks, then wait for a call. An abandoned thread ends."""
        while True:
            fill = self._next()
            if fill is None:
                if not self._calls.get():
                    return
            elif not self._fill(fill):
                return

    def _next(self) -> BitmaskJob | None:
        with self._lock:
            return self._waiting.pop() if self._waiting else None

    def _fill(self, fill: BitmaskJob) -> bool:
        """Fill one mask. False if it took so long that another thread has replaced this one."""
        fill.thread_id = threading.get_native_id()
        fill.began = self._clock()
        began = self._work_clock()
        error = _attempt(fill)
        with self._arrived:
            fill.done = True
            if fill.abandoned:
                return False
            fill.seconds = self._work_clock() - began
            fill.error = error
            fill.countdown.remaining -= 1
            if not fill.countdown.remaining:
                self._arrived.notify_all()
        return True


def _attempt(fill: BitmaskJob) -> EngineError | None:
    try:
        fill.mask.fill(fill.row, 0)
    except BaseException as error:
        # Panics of extension modules are not derived from `Exception`.
        _logger.exception("a grammar's mask could not be filled")
        return GrammarFailed.of(error)
    return None
