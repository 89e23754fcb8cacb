"""Reports that the start of an engine goes on: its process computed or read since the last report.

Invariant: a process that only waits, for whatever it may be, reports nothing; so a parent need not know how long a stage takes.
"""

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from loraplex.platform.engines.spawn_messages import Progress, Report

INTERVAL_S: Final = 1.0
MIN_CPU_S: Final = 0.01
MIN_READ_BYTES: Final = 1 << 16
"""In one interval; this thread itself takes a small part of it."""
IO_COUNTERS: Final = Path("/proc/self/io")


@contextmanager
def reporting_progress(report: Callable[[Report], None]) -> Iterator[None]:
    """Report from a thread while the block lasts."""
    ended = threading.Event()
    thread = threading.Thread(target=_report, args=(report, ended), name="start-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _report(report: Callable[[Report], None], ended: threading.Event) -> None:
    cpu_s, read_bytes = _used_cpu_s(), _read_bytes()
    while not ended.wait(INTERVAL_S):
        now_s, now_bytes = _used_cpu_s(), _read_bytes()
        if now_s - cpu_s >= MIN_CPU_S or now_bytes - read_bytes >= MIN_READ_BYTES:
            report(Progress())
        cpu_s, read_bytes = now_s, now_bytes


def _used_cpu_s() -> float:
    """Of this process and its children that have ended, such as compilers. `os.times` rounds to ticks of `MIN_CPU_S`."""
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def _read_bytes() -> int:
    """Through calls and through page faults of mapped files; 0 where the system does not count them."""
    try:
        lines = dict(line.split(": ") for line in IO_COUNTERS.read_text().splitlines())
    except OSError:
        return 0
    return int(lines["rchar"]) + int(lines["read_bytes"])
