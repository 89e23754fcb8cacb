"""The jobs of the whole model, in order of value, each in a process of its own."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from tests.benchmarks.gpu import traffic, whole_model
from tests.benchmarks.gpu.compilations import counted_compilations
from tests.benchmarks.gpu.faults import attempt
from tests.benchmarks.gpu.profile_step import profile_steps
from tests.benchmarks.gpu.sizes import DRY, REAL, Line, Size
from tests.benchmarks.gpu.step_times import sampling_steps, tpot
from tests.benchmarks.gpu.time_left import TimeLeft
from tests.benchmarks.gpu.worker import Results, device_of


@dataclass(frozen=True, slots=True)
class Job:
    """`seconds` is its cap on a GPU, from the start of its process on; what it does by then is estimated where it is defined.

    Not `runs_dry`: one like it does.
    """

    name: str
    seconds: float
    run: Callable[[Size, torch.device, TimeLeft], Iterator[Line]]
    runs_dry: bool = True


MODEL_JOBS = (
    Job("logits", 45.0, whole_model.logits),
    Job("tpot int4", 90.0, tpot("int4")),
    Job("swap", 35.0, traffic.swaps),
    Job("zipf", 60.0, traffic.zipf),
    Job("mixed", 70.0, traffic.mixed),
    Job("tpot none", 75.0, tpot("none"), runs_dry=False),
    Job("peft", 60.0, traffic.peft),
    Job("json", 40.0, traffic.json_rows),
    Job("graphs", 30.0, whole_model.graphs),
    Job("steps", 45.0, sampling_steps),
    Job("tpot int8", 75.0, tpot("int8"), runs_dry=False),
)
PROFILE_S = 40.0


def every_job(out: Path) -> list[Job]:
    """With the one that writes traces to `out`."""
    return [*MODEL_JOBS, Job("profile", PROFILE_S, partial(profile_steps, out=out))]


def run_model(connection: Connection, is_dry: bool, out: str, names: Sequence[str]) -> None:
    """The named jobs, in this process."""
    results, device = Results(connection), device_of(is_dry)
    if is_dry:
        torch.set_num_threads(1)
    jobs = {job.name: job for job in every_job(Path(out))}
    for name in names:
        results.begin(name)
        left = TimeLeft.of(jobs[name].seconds)
        work = partial(jobs[name].run, DRY if is_dry else REAL, device, left)
        head = {"stage": "time", "op": "model", "case": name}
        attempt(results, head, counted_compilations(name, work), device)
