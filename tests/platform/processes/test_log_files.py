"""Files of log lines: private, redacted, bounded, and never written by two processes."""

import json
import subprocess
import sys
from pathlib import Path

import structlog
from typer.testing import CliRunner

from loraplex.platform.cli.main import main
from loraplex.platform.processes.log_files import also_log_to

WRITE = """
import sys
from pathlib import Path
import structlog
from loraplex.platform.processes import log_files
from loraplex.platform.processes.logs import configure_logs
log_files.MAX_BYTES = 2000
configure_logs("info")
log_files.also_log_to(Path(sys.argv[1]), "engine")
for number in range(int(sys.argv[2])):
    structlog.get_logger().info("a step", number=number, note="lpx_live_4hT9_" + "s" * 43)
print("written", flush=True)
sys.stdin.read()
"""


def writer(home: Path, lines: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITE, str(home), str(lines)]
    process = subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None and process.stdout.readline() == "written\n"
    return process


def test_each_process_has_its_private_file_of_bounded_size(tmp_path: Path) -> None:
    with writer(tmp_path, 100) as first, writer(tmp_path, 1) as second:
        folder = tmp_path / "logs"
        assert folder.stat().st_mode & 0o777 == 0o700
        files = {path.name: path for path in folder.glob("*.log*")}
        assert {"engine.log", "engine.log.4", "engine-2.log"} <= files.keys() and "engine.log.5" not in files
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in files.values())
        assert all(path.stat().st_size <= 2000 for path in files.values())
        for process in (first, second):
            process.communicate()
    newest = CliRunner().invoke(main, ["logs", "--lines", "3", "--data-dir", str(tmp_path)]).stdout
    lines = [json.loads(line) for line in newest.splitlines()]
    assert [(each["process"], each["number"]) for each in lines] == [
        *(("engine", 98), ("engine", 99), ("engine-2", 0))
    ]
    assert "sss" not in newest
    missing = CliRunner().invoke(main, ["logs", "--process", "gateway", "--data-dir", str(tmp_path)])
    assert missing.exit_code == 1 and "`loraplex serve` writes it" in missing.stderr


def test_a_folder_that_cannot_be_written_stops_no_start(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no folder")
    before = structlog.get_config()["processors"]
    also_log_to(tmp_path / "data", "engine")
    assert structlog.get_config()["processors"] is before
