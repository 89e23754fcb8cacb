"""What each command runs, in order of value, with the seconds that each stage may take.

Invariant: a stage costs at most its seconds, so that a command ends within their sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["probe", "build", "check", "time", "peers", "sweep", "tests", "job"]
PLANS = ("first", "second", "rest")
LEAST_LEFT_S = {"second": 200.0}
"""Without so much time left, that command does not begin: what it holds would end in the middle."""
REST_S = 535.0
"""Of the rest, unless said otherwise: it has more than any command has time for."""


@dataclass(frozen=True, slots=True)
class Stage:
    """`seconds` is its cap, the start of its processes included; `processes` at once, None for one a core.

    `tier`: of the kernels. The name of a `job` is the job's.
    """

    name: str
    kind: Kind
    seconds: float
    processes: int | None = 1
    tier: int = 1


FIRST_JOBS = ("tpot int4", "swap", "zipf", "mixed", "tpot none")
SECOND_JOBS = ("peft", "json", "profile", "graphs")


def plan_of(command: str, jobs: Mapping[str, float]) -> list[Stage]:
    """The stages of a command; `jobs` are the caps of all jobs."""
    first = [
        Stage("probe", "probe", 15.0),
        Stage("build", "build", 40.0, processes=None),
        Stage("check", "check", 20.0, processes=3),
        Stage("tests", "tests", 60.0, processes=4),
        _job("logits", jobs),
        Stage("time", "time", 25.0),
        *(_job(name, jobs) for name in FIRST_JOBS),
    ]
    second = [_job(name, jobs) for name in SECOND_JOBS]
    if command != "rest":
        return first if command == "first" else second
    known = {stage.name for stage in (*first, *second)}
    return [
        *first,
        *second,
        Stage("check tier 2", "check", 60.0, processes=3, tier=2),
        Stage("time tier 2", "time", 60.0, tier=2),
        Stage("peers", "peers", 60.0),
        Stage("sweep", "sweep", 90.0),
        *(_job(name, jobs) for name in jobs if name not in known),
        Stage("all tests", "tests", REST_S, processes=8),
    ]


def _job(name: str, jobs: Mapping[str, float]) -> Stage:
    return Stage(name, "job", jobs.get(name, 0.0))


def caps_of_jobs(out: Path) -> dict[str, float]:
    """By name; none where the engine cannot be imported, which each job's own stage reports. Kernels need no engine."""
    try:
        from tests.benchmarks.gpu.jobs import every_job
    except ImportError:
        return {}
    return {job.name: job.seconds for job in every_job(out)}


def texts(plan: list[Stage], left: float) -> list[str]:
    """The plan as it is printed, with the sum of its caps."""
    total = sum(stage.seconds for stage in plan)
    return [
        *(f"{stage.seconds:6.0f} s  {stage.name}" for stage in plan),
        f"{total:6.0f} s  together; at most {min(total, left):.0f} s are used",
    ]
