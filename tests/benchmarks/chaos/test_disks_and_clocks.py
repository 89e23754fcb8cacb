"""A disk fills up and is free again, and a clock jumps, in processes of their own; nothing else notices."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.benchmarks.chaos.clocks import Clock, build_libraries, missing_for_clocks
from tests.benchmarks.chaos.disks import namespace_command
from tests.benchmarks.checkout import CHECKOUT
from tests.end_to_end.live_server import until

FILLED = """
import sys
from pathlib import Path
from tests.benchmarks.chaos.disks import Disk
disk = Disk(Path(sys.argv[1]), 4 << 20)
disk.mount()
disk.fill(1 << 20)
print(disk.free_bytes)
disk.fill(0)
print(disk.free_bytes)
disk.clear()
print(disk.free_bytes)
disk.unmount()
"""
TELLS = """
import ctypes, sys, time
CLOCK_MONOTONIC = 1
libc, attributes, condition, mutex = ctypes.CDLL(None), *(ctypes.create_string_buffer(64) for _ in range(3))
libc.pthread_condattr_init(attributes)
libc.pthread_condattr_setclock(attributes, CLOCK_MONOTONIC)
libc.pthread_cond_init(condition, attributes)
libc.pthread_mutex_init(mutex, None)

class Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]

def waited():
    seconds, nanoseconds = divmod(time.monotonic_ns() + 50_000_000, 10**9)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_cond_timedwait(condition, mutex, ctypes.byref(Timespec(seconds, nanoseconds)))
    libc.pthread_mutex_unlock(mutex)

def seconds_of(call):
    began = time.monotonic()
    call()
    return time.monotonic() - began

for line in sys.stdin:
    print(time.time(), time.monotonic(), seconds_of(waited), seconds_of(lambda: time.sleep(0.05)), flush=True)
"""
"""Its clocks, and how long two waits of 0.05 s by the monotonic clock take: that of a condition, as of CPython's GIL, and a sleep."""


@pytest.mark.skipif(not namespace_command(), reason="this user may not mount in a namespace of its own")
def test_a_disk_fills_up(tmp_path: Path) -> None:
    command = (*namespace_command(), sys.executable, "-c", FILLED, str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, check=True)
    assert done.stdout.split() == [str(1 << 20), "0", str(4 << 20)]
    assert not [*tmp_path.iterdir()]


STARTS = """
import subprocess, sys
from tests.benchmarks.chaos.disks import namespace_command
sleeps = "import time; print('runs', flush=True); time.sleep(600)"
subprocess.run([*namespace_command(), sys.executable, "-c", sleeps, sys.argv[1]])
"""


def with_argument(argument: str) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if argument in (each.info["cmdline"] or ())]


@pytest.mark.skipif(not namespace_command(), reason="this user may not mount in a namespace of its own")
def test_a_namespace_ends_with_the_process_that_made_it(tmp_path: Path) -> None:
    argument = str(tmp_path)
    command = (sys.executable, "-c", STARTS, argument)
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=CHECKOUT) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"runs\n"
        assert len(with_argument(argument)) > 1
        parent.kill()
    until(lambda: not with_argument(argument), 60, "no process is left")


MISSING = missing_for_clocks()


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_a_clock_jumps_in_its_process_alone(tmp_path: Path) -> None:
    """Waits by the monotonic clock end neither early nor an hour late."""
    clock = Clock(build_libraries(tmp_path), tmp_path / "clock")
    with subprocess.Popen(
        (sys.executable, "-c", TELLS),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=clock.environment,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def distance_min() -> tuple[int, int]:
            """How far its time of day and its monotonic clock are from this process's, in minutes."""
            assert process.stdin is not None and process.stdout is not None
            print(file=process.stdin, flush=True)
            wall, monotonic, *waits_s = map(float, process.stdout.readline().split())
            assert len(waits_s) == 2 and all(0.05 <= wait_s < 1800 for wait_s in waits_s)
            return round((wall - time.time()) / 60), round((monotonic - time.monotonic()) / 60)

        assert distance_min() == (0, 0)
        assert clock.is_in(process.pid) and not clock.is_in(os.getpid())
        for minutes in (60, -60):
            clock.jump_to(60 * minutes)
            deadline = time.monotonic() + 60
            while distance_min()[0] != minutes:
                assert time.monotonic() < deadline, "the process has not noticed the jump"
            assert distance_min() == (minutes, 0)
        process.stdin.close()
