"""Threads beside the step thread: daemons that may run on every core of the process, at a priority of their own.

Invariant: a thread made by the step thread inherits its core, which OpenMP bound; none of these keeps it.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

FAREWELL_S = 1.0


def start_side_thread(
    name: str, run: Callable[[], None], cores: set[int], niceness: int = 0
) -> threading.Thread:
    """Start `run` on any of `cores`. `niceness` is added to the process's, where the system keeps one per thread."""

    def body() -> None:
        os.sched_setaffinity(0, cores)
        if niceness:
            lower_priority(threading.get_native_id(), niceness)
        run()

    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    return thread


def lower_priority(native_id: int, niceness: int) -> None:
    """Add to one thread's niceness. A thread that has ended, or a system that forbids it, changes nothing."""
    with suppress(OSError):
        now = os.getpriority(os.PRIO_PROCESS, native_id)
        os.setpriority(os.PRIO_PROCESS, native_id, min(19, now + niceness))


def join_all(threads: Iterable[threading.Thread]) -> None:
    """Wait until they have ended, `FAREWELL_S` in all: one that computes while the interpreter goes away can crash it."""
    deadline = time.monotonic() + FAREWELL_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
