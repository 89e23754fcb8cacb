"""A start that computes or reads reports progress; one that waits does not. In a process of its own, whose use is counted."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, time
from pathlib import Path
from loraplex.platform.engines import start_progress

file, found = Path(sys.argv[1]), []
start_progress.INTERVAL_S = 0.2
file.write_bytes(b" " * start_progress.MIN_READ_BYTES)
with start_progress.reporting_progress(found.append):
    for _ in range(6):
        {work}
        time.sleep(0.1)
print(len(found))
"""


@pytest.mark.parametrize(
    ("work", "reports"), [("sum(range(1_000_000))", True), ("file.read_bytes()", True), ("pass", False)]
)
def test_what_counts_as_progress(tmp_path: Path, work: str, reports: bool) -> None:
    command = [sys.executable, "-c", SCRIPT.format(work=work), str(tmp_path / "weights")]
    assert (int(subprocess.check_output(command, timeout=60)) > 0) == reports
