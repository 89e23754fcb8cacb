"""Every job, tiny and on the CPU: its lines, and whether they answer the rows of the target table that name it."""

from pathlib import Path

import pytest
import torch
from tests.benchmarks.gpu.jobs import every_job, process_age
from tests.benchmarks.gpu.record import FIELDS
from tests.benchmarks.gpu.sizes import DRY, REAL, Line
from tests.benchmarks.gpu.targets import targets
from tests.benchmarks.gpu.time_left import TimeLeft
from tests.engine.interpreter_runs import INTERPRETING

pytestmark = pytest.mark.skipif(INTERPRETING, reason="jobs run as they do on a CPU")

CPU = torch.device("cpu")
ONLY_ON_CUDA = {"swap/share"}
Lines = dict[str, list[Line]]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """Of each job."""
    pytest.importorskip("llguidance")
    folder = tmp_path_factory.mktemp("jobs")
    return {job.name: [*job.run(DRY, CPU, TimeLeft.of(600.0))] for job in every_job(folder)}


def tiny(case: str) -> str:
    """The dry run's name of a case of the real run."""
    names = {REAL.shape.name: DRY.shape.name}
    names |= {f"b{count}/": f"b{DRY.rows[0]}/" for count in REAL.rows[:-1]}
    names |= {f"b{REAL.most_rows}/": f"b{DRY.most_rows}/"}
    names |= {f"/{a}/": f"/{b}/" for (a, _), (b, _) in zip(REAL.prefills, DRY.prefills, strict=True)}
    for name, other in names.items():
        case = case.replace(name, other)
    return case


def test_each_job_measures_the_rows_of_the_table_that_name_it(lines: Lines) -> None:
    measured = [target for target in targets() if target.job]
    assert {target.job for target in measured} <= {*lines}
    for target in measured:
        cases = {line["case"] for line in lines[target.job] if line["ok"]}
        assert {tiny(case) for case in target.cases} - cases <= ONLY_ON_CUDA, target.name


def test_lines_are_whole_and_each_case_has_one(lines: Lines) -> None:
    for job, its in lines.items():
        cases = [line["case"] for line in its]
        assert its and len(cases) == len({*cases}), job
        for line in its:
            assert line["ok"] is True and line["value"] >= 0 and line["unit"], line
            assert not {*line} - {*FIELDS}


def test_medians_say_how_many_rounds_they_are_of(lines: Lines) -> None:
    ratios = [line for line in lines["tpot int4"] if "over base" in line["case"]]
    assert ratios and all(line["shape"]["rounds"] == DRY.rounds for line in ratios[:2])


def test_a_job_without_time_says_what_it_left_out(tmp_path: Path) -> None:
    """What has begun ends; nothing else begins."""
    for job in every_job(tmp_path):
        if job.name in ("tpot none", "mixed", "profile"):
            found = [*job.run(DRY, CPU, TimeLeft.of(0.0))]
            left = [line for line in found if line["ok"] is None]
            assert left and all(line["error"].startswith("not run: ") for line in left), job.name


def test_the_age_of_a_process_counts_from_its_start() -> None:
    first = process_age()
    assert 0 < first <= process_age()
