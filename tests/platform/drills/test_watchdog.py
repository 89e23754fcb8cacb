"""The watchdog undoes what a killed drill left, and only that."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.platform.server.serve_process import until

from loraplex.platform.drills import watchdog
from loraplex.platform.drills.errors import DrillImpossible
from loraplex.platform.drills.undo import ContinueProcess, RemoveFile, Undo
from loraplex.platform.drills.watchdog import DrillWatchdog, Duty, read_duties, undo_all

DRILL = """
    import asyncio, os, signal, sys
    from loraplex.platform.drills.undo import ContinueProcess, RemoveFile
    from loraplex.platform.drills.watchdog import DrillWatchdog

    async def drill():
        async with DrillWatchdog(600.0) as watchdog:
            await watchdog.ready()
            left, kept, pid, started_at = sys.argv[1:]
            watchdog.add(RemoveFile(left))
            watchdog.drop(watchdog.add(RemoveFile(kept)))
            watchdog.add(ContinueProcess(int(pid), float(started_at)))
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(drill())
"""


def test_a_killed_drill_leaves_no_fault(tmp_path: Path) -> None:
    left, kept = tmp_path / "left", tmp_path / "kept"
    left.touch()
    kept.touch()
    with subprocess.Popen(["sleep", "600"]) as stopped:
        try:
            os.kill(stopped.pid, signal.SIGSTOP)
            process = psutil.Process(stopped.pid)
            until(lambda: process.status() == psutil.STATUS_STOPPED)
            arguments = [str(left), str(kept), str(stopped.pid), repr(process.create_time())]
            command = [sys.executable, "-c", textwrap.dedent(DRILL), *arguments]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
            until(lambda: process.status() != psutil.STATUS_STOPPED)
            until(lambda: not left.exists())
            assert kept.exists()
        finally:
            stopped.kill()


def duties(monkeypatch: pytest.MonkeyPatch, *sent: Duty, closes: bool = True) -> list[Undo]:
    """What is left to undo after these messages came through standard input, in pieces."""
    reading, writing = os.pipe()
    data = b"".join(msgspec.json.encode(each) + b"\n" for each in sent)
    for start in range(0, len(data), 7):
        os.write(writing, data[start : start + 7])
    if closes:
        os.close(writing)
    kept = os.dup(0)
    os.dup2(reading, 0)
    monkeypatch.setattr(watchdog, "READ_BYTES", 5)
    try:
        return read_duties(60.0 if closes else 0.2)
    finally:
        os.dup2(kept, 0)
        for each in (kept, reading) if closes else (kept, reading, writing):
            os.close(each)


@pytest.mark.parametrize("closes", [True, False], ids=["end of the drill", "time is over"])
def test_what_was_not_dropped_is_undone_the_last_first(monkeypatch: pytest.MonkeyPatch, closes: bool) -> None:
    first, second, third = RemoveFile("1"), RemoveFile("2"), ContinueProcess(3, 4.5)
    sent = [Duty(1, first), Duty(2, second), Duty(3, third), Duty(2, dropped=True)]
    assert duties(monkeypatch, *sent, closes=closes) == [third, first]


async def test_an_undo_that_fails_is_repeated_and_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "RETRY_S", 0.01)
    folder, file = tmp_path / "folder", tmp_path / "file"
    file.touch()
    folder.mkdir()
    attempts = 0
    run = RemoveFile.run

    async def counted(undo: RemoveFile) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 4:
            folder.rmdir()
        await run(undo)

    monkeypatch.setattr(RemoveFile, "run", counted)
    await undo_all([RemoveFile(str(folder)), RemoveFile(str(file))])
    assert attempts == 4 and not file.exists()


async def test_without_a_watchdog_no_fault_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(limit_s: float) -> "subprocess.Popen[bytes]":
        child = subprocess.Popen(["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.wait()
        return child

    monkeypatch.setattr(watchdog, "_start", ended)
    async with DrillWatchdog(60.0) as found:
        with pytest.raises(DrillImpossible):
            await found.ready()
        with pytest.raises(DrillImpossible):
            found.add(RemoveFile("1"))
        found.drop(1)
