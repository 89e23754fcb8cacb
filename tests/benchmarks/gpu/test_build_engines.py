"""What the stage `build` compiles for engines is all that the jobs launch: they run at full width on tensors without memory."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.gpu import build_engines, json_grammar, step_times, traffic, whole_model
from tests.benchmarks.gpu.build_engines import EngineKind, engine_launches
from tests.benchmarks.gpu.jobs import Job, every_job
from tests.benchmarks.gpu.scripted_masks import FORCED, scripted_masks
from tests.benchmarks.gpu.sizes import REAL, Line
from tests.benchmarks.gpu.time_left import TimeLeft
from tests.benchmarks.gpu.unfilled_engine import LAYERS, META, Key, unfilled_engines
from tests.benchmarks.kernels.shapes import LLAMA_3_8B
from tests.engine.interpreter_runs import INTERPRETING

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETING, reason="kernels are not run here")

SIZE = replace(
    REAL,
    shape=replace(LLAMA_3_8B, layers=LAYERS),
    steps=1,
    rounds=1,
    registered=80,
    resident=24,
    requests=48,
    tokens=8,
    context=40,
    output=6,
    host_bytes=1 << 20,
    copy_bytes=1 << 10,
    seconds=0.1,
    shares=(0.001,),
)
"""Widths, rows and steps of a GPU; few tokens, of which the launches only depend through those."""
JOBS = [job for job in every_job(Path()) if job.name != "profile"]
"""The profiler traces a device; its engine and rows are those of `tpot int4`."""
RARE = ("tpot none", "tpot int8")
"""Their kinds of engines are also those of other jobs, or not of the first commands."""


class EngineDone(Exception):
    """What is left of a job runs in another library."""


def without_peer(*_: Any) -> None:
    raise EngineDone


@pytest.fixture(scope="module")
def built_keys() -> set[Key]:
    return set(engine_launches(SIZE).found)


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers are left out, and masks are scripted: a grammar does not go on after tokens that nothing has computed."""
    monkeypatch.setattr(whole_model, "_peer", without_peer)
    monkeypatch.setattr(traffic, "peft_rates", without_peer)
    monkeypatch.setattr(step_times, "copy_rate", lambda *_: 1.0)
    monkeypatch.setattr(json_grammar, "json_masks", scripted_masks)
    monkeypatch.setattr(json_grammar, "json_spec", lambda: FORCED)


def launched(job: Job) -> tuple[set[Key], list[Line]]:
    """What the job launches, and its lines."""
    lines: list[Line] = []
    with unfilled_engines() as found:
        try:
            lines.extend(job.run(SIZE, META, TimeLeft.of(600.0)))
        except EngineDone:
            assert job.name in ("logits", "peft")
    return set(found.found), lines


@pytest.mark.usefixtures("on_meta")
@pytest.mark.parametrize(
    "job",
    [pytest.param(job, id=job.name, marks=pytest.mark.long if job.name in RARE else ()) for job in JOBS],
)
def test_a_job_launches_nothing_that_was_not_built(job: Job, built_keys: set[Key]) -> None:
    keys, lines = launched(job)
    assert lines and all(line["ok"] for line in lines)
    assert len(keys) > 10
    assert sorted(map(str, keys - built_keys)) == []


@pytest.mark.usefixtures("on_meta")
def test_an_engine_that_is_not_built_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        build_engines, "engine_kinds", lambda size: [EngineKind("none", size.most_rows, None)]
    )
    keys, _ = launched(next(job for job in JOBS if job.name == "swap"))
    missing = {key[0] for key in keys - set(engine_launches(SIZE).found)}
    assert {"shrink_row_kernel", "expand_row_kernel"} <= missing


BUILDS = """
import json
from tests.benchmarks.gpu.build_engines import engine_builds
from tests.benchmarks.gpu.compilations import compilations
for turn in range(2):
    with compilations() as compiled:
        lines = [line for build in engine_builds(is_dry=True).values() for line in build()]
    print(json.dumps([lines, compiled.total()]))
    from tests.benchmarks.gpu.build_engines import _every_launch
    for launch in _every_launch(True):
        launch.kernel.device_caches.clear()
"""


@pytest.mark.long
def test_what_is_built_once_is_found_by_the_next_process(tmp_path: Path) -> None:
    """Triton forgets what it has loaded between the turns, as it is where a process begins."""
    environment = os.environ | {"PYTHONPATH": ".src:.", "TRITON_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", BUILDS],
        check=True,
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    (lines, compiled), (again, found) = (
        json.loads(text) for text in ended.stdout.splitlines() if text[0] == "["
    )
    assert lines and compiled == len(lines) and found == 0
    assert all(line["ok"] and line["regs"] > 0 and line["stage"] == "build" for line in lines)
    assert [line["case"] for line in again] == [line["case"] for line in lines]
