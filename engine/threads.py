"""The threads of an engine: one `StepThread` loads the model and runs the step loop; side threads are daemons on any core.

Invariant: only the step thread enters a parallel region with a team of more than one thread. OpenMP keeps a team per
thread; with more team members than cores it stops spinning at barriers, and a step takes half as long again.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

JOIN_TIMEOUT_S = 1.0


def start_side_thread(
    name: str, run: Callable[[], None], cores: set[int], niceness: int = 0
) -> threading.Thread:
    """Start `run` on any of `cores`. `niceness` is added to the process's, on systems that keep one per thread."""

    def run_with_priority() -> None:
        os.sched_setaffinity(0, cores)
        if niceness:
            lower_priority(threading.get_native_id(), niceness)
        run()

    thread = threading.Thread(target=run_with_priority, name=name, daemon=True)
    thread.start()
    return thread


def lower_priority(native_id: int, niceness: int) -> None:
    """Add to one thread's niceness. No effect on a thread that has ended, or where the system forbids it."""
    with suppress(OSError):
        now = os.getpriority(os.PRIO_PROCESS, native_id)
        os.setpriority(os.PRIO_PROCESS, native_id, min(19, now + niceness))


def join_all(threads: Iterable[threading.Thread]) -> None:
    """Wait until the threads have ended, `JOIN_TIMEOUT_S` in all. A thread that computes during interpreter shutdown can crash
    it.
    """
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


Result = TypeVar("Result")


class StepThread:
    """Runs calls one after another. It is a daemon: a call that never returns does not keep the process alive."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, name="engine-steps", daemon=True).start()

    def submit(self, call: Callable[[], Result]) -> "Future[Result]":
        """Queue a call; the future carries its result or its exception."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - passed to the waiting caller
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.put(run)
        return future

    def _run(self) -> None:
        while True:
            self._calls.get()()
