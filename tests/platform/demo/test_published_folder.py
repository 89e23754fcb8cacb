"""A folder is built once and appears whole, whatever dies in between."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loraplex.platform.demo.published_folder import publish_once

# Builds in a child of its own, as the conversion does, until the file `go` is there; argv: target, go, word.
BUILDER = """
import sys
from pathlib import Path
from loraplex.platform.demo.published_folder import publish_once
from loraplex.platform.demo.stages import run_stage

CHILD = '''
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
(folder / "first").write_text(sys.argv[3])
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.01)
(folder / "second").write_text(sys.argv[3])
'''

def build(draft, lock):
    print("building", flush=True)
    run_stage("build", [sys.executable, "-c", CHILD, str(draft / "out"), sys.argv[2], sys.argv[3]], lock)
    return draft / "out"

publish_once(Path(sys.argv[1]), build, lambda: print("waiting", flush=True))
print("done", flush=True)
"""


def builder(target: Path, go: Path, word: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(target), str(go), word],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def test_two_processes_build_once(tmp_path: Path) -> None:
    target, go = tmp_path / "models" / "thing", tmp_path / "go"
    first = builder(target, go, "one")
    wait_for(tmp_path / "models" / ".thing.draft" / "out" / "first")
    second = builder(target, go, "two")
    assert second.stdout is not None
    assert second.stdout.readline() == "waiting\n"
    go.touch()
    assert first.communicate(timeout=60)[0].split() == ["building", "done"]
    assert second.communicate(timeout=60)[0].split() == ["done"]
    assert (target / "first").read_text() == (target / "second").read_text() == "one"
    assert sorted(path.name for path in target.parent.iterdir()) == [".thing.lock", "thing"]


def test_killed_build_is_taken_up_after_its_orphan_ends(tmp_path: Path) -> None:
    target, go = tmp_path / "thing", tmp_path / "go"
    killed = builder(target, go, "killed")
    draft = tmp_path / ".thing.draft" / "out"
    wait_for(draft / "first")
    killed.send_signal(signal.SIGKILL)
    killed.wait(timeout=60)
    assert not target.exists()

    def build(folder: Path, lock: int) -> Path:
        assert (draft / "second").exists(), "the orphan was still writing"
        (draft / "second").write_text("again")
        return draft

    publish_once(target, build, go.touch)
    assert (target / "second").read_text() == "again"
    assert killed.stdout is not None
    killed.stdout.close()


def test_failed_build_shows_nothing_and_frees_the_lock(tmp_path: Path) -> None:
    def build(draft: Path, lock: int) -> Path:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        publish_once(tmp_path / "thing", build, lambda: None)
    assert not (tmp_path / "thing").exists()
    with (tmp_path / ".thing.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
