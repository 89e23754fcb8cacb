"""The real sizes of the jobs, without a GPU: what only a run at full size would find out too late."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.benchmarks.gpu import profile_step, step_times, traffic, whole_model
from tests.benchmarks.gpu.engine_rows import Rows
from tests.benchmarks.gpu.jobs import every_job
from tests.benchmarks.gpu.sizes import REAL
from tests.benchmarks.gpu.time_left import TimeLeft
from tests.benchmarks.kernels.shapes import TINY


class Begun(Exception):
    """A job has its weights and asks for its engine."""


def test_no_job_asks_for_longer_rows_than_its_model_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("llguidance")
    asked: list[tuple[Rows, int]] = []

    @contextmanager
    def recorded(model: Any, source: Any, rows: Rows, options: Any) -> Iterator[None]:
        asked.append((rows, model.loaded.max_model_len))
        raise Begun
        yield

    for module in (profile_step, step_times, traffic, whole_model):
        monkeypatch.setattr(module, "running_engine", recorded)
    size, jobs = replace(REAL, shape=TINY, copy_bytes=1 << 20), every_job(tmp_path)
    for job in jobs:
        with pytest.raises(Begun):
            [*job.run(size, torch.device("cpu"), TimeLeft.of(600.0))]
    assert len(asked) == len(jobs)
    assert [rows for rows, longest in asked if rows.prompt + rows.tokens > longest] == []
