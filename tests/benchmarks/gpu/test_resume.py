"""A command killed with all its processes at 20 random seconds, resumed from its lines, on machine after machine: in the end
each piece of work counts once, and what had come to its end was not done again.
"""

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.gpu.state import counted, read_lines

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
KILLS = 20
ON_ONE_MACHINE = 4
"""Kills before the next machine has only the lines: none of the compiled kernels."""
MOST_S = 20.0
FEW = "probe,rms norm,silu mul,rotary,bitmask,gemm,logits,swap,zipf,test_replayed"


class Machine:
    """A folder of lines and a cache of kernels."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines = folder / "out" / "gpu.jsonl"
        self.printed = folder / "printed"
        folder.mkdir()

    def run(self, resumed: list[Path], seconds: float | None) -> int | None:
        """The exit status; None where it was killed after so many seconds."""
        command = [sys.executable, "-m", "tests.benchmarks.gpu", "first", "--dry", "--only", FEW]
        known = [str(path) for path in resumed if path.exists()]
        process = subprocess.Popen(
            [*command, "--out", str(self.lines.parent), *(["--resume", *known] if known else [])],
            env=os.environ | {"PYTHONPATH": ".src", "TRITON_CACHE_DIR": str(self.folder / "triton")},
            cwd=ROOT,
            stdout=self.printed.open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def cases(lines: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    return Counter((line["stage"], line["case"]) for line in lines if line["work"] is not None)


@pytest.mark.long
def test_each_piece_of_work_counts_once_after_kills(tmp_path: Path) -> None:
    whole = Machine(tmp_path / "whole")
    assert whole.run([], None) == 0
    expected = cases(counted(read_lines([whole.lines])))
    drawn, kills, completed = random.Random(29), 0, 0
    while kills < KILLS or not completed:
        machines = [Machine(tmp_path / f"{completed}-0")]
        status = None
        while status is None:
            if kills and kills % ON_ONE_MACHINE == 0:
                machines.append(Machine(tmp_path / f"{completed}-{len(machines)}"))
            seconds = drawn.uniform(1.0, MOST_S) if kills < KILLS else None
            status = machines[-1].run([machine.lines for machine in machines], seconds)
            kills += status is None
        assert status == 0, machines[-1].printed.read_text()[-4000:]
        lines = read_lines([machine.lines for machine in machines if machine.lines.exists()])
        assert cases(counted(lines)) == expected
        done = Counter(
            (line["work"], line["cache"] if line["work"].startswith("build/") else None)
            for line in lines
            if line["final"] and line["ok"] is not None
        )
        assert set(done.values()) == {1}
        completed += 1
        print(f"{kills} kills, {len(machines)} machines, {len(done)} pieces of work")
