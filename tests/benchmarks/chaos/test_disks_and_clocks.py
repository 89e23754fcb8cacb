"""A disk fills up and is free again, and a clock jumps, in processes of their own; nothing else notices."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.benchmarks.chaos.clocks import Clock, find_library
from tests.benchmarks.chaos.disks import namespace_command
from tests.benchmarks.checkout import CHECKOUT

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
TELLS = "import sys, time\nfor line in sys.stdin: print(time.time(), time.monotonic(), flush=True)"


@pytest.mark.skipif(not namespace_command(), reason="this user may not mount in a namespace of its own")
def test_a_disk_fills_up(tmp_path: Path) -> None:
    command = (*namespace_command(), sys.executable, "-c", FILLED, str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, check=True)
    assert done.stdout.split() == [str(1 << 20), "0", str(4 << 20)]
    assert not [*tmp_path.iterdir()]


LIBRARY = find_library()


@pytest.mark.skipif(LIBRARY is None, reason="libfaketime is missing")
def test_a_clock_jumps_in_its_process_alone(tmp_path: Path) -> None:
    assert LIBRARY is not None
    clock = Clock(LIBRARY, tmp_path / "clock")
    with subprocess.Popen(
        (sys.executable, "-c", TELLS),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=clock.environment,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def distance_s() -> tuple[int, int]:
            """How far its time of day and its monotonic clock are from this process's."""
            assert process.stdin is not None and process.stdout is not None
            print(file=process.stdin, flush=True)
            wall, monotonic = map(float, process.stdout.readline().split())
            return round((wall - time.time()) / 60), round((monotonic - time.monotonic()) / 60)

        assert distance_s() == (0, 0)
        for minutes in (60, -60):
            clock.jump_to(60 * minutes)
            deadline = time.monotonic() + 60
            while distance_s()[0] != minutes:
                assert time.monotonic() < deadline, "the process has not noticed the jump"
                time.sleep(0.1)
            assert distance_s() == (minutes, 0)
        process.stdin.close()
