"""Every job, tiny and on the CPU: its lines, and whether they answer the rows of the target table that name it."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tests.benchmarks.gpu.compilations import counted_compilations
from tests.benchmarks.gpu.jobs import every_job
from tests.benchmarks.gpu.record import FIELDS
from tests.benchmarks.gpu.sizes import DRY, REAL, Line, line
from tests.benchmarks.gpu.targets import targets
from tests.benchmarks.gpu.time_left import TimeLeft
from tests.engine.interpreter_runs import INTERPRETING

pytestmark = pytest.mark.skipif(INTERPRETING, reason="jobs run as they do on a CPU")

CPU = torch.device("cpu")
ONLY_ON_CUDA = {"swap/share"}
Lines = dict[str, list[Line]]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """Of each job, on one core like `run_model`: threads of tiny steps would wait for one another."""
    pytest.importorskip("llguidance")
    folder, threads = tmp_path_factory.mktemp("jobs"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {job.name: [*job.run(DRY, CPU, TimeLeft.of(600.0))] for job in every_job(folder)}
    finally:
        torch.set_num_threads(threads)


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
        cases = {each["case"] for each in lines[target.job] if each["ok"]}
        assert {tiny(case) for case in target.cases} - cases <= ONLY_ON_CUDA, target.name


def test_lines_are_whole_and_each_case_has_one(lines: Lines) -> None:
    for job, its in lines.items():
        cases = [each["case"] for each in its]
        assert its and len(cases) == len({*cases}), job
        for each in its:
            assert each["ok"] is True and each["value"] >= 0 and each["unit"], each
            assert not {*each} - {*FIELDS}


def test_medians_say_how_many_rounds_they_are_of(lines: Lines) -> None:
    ratios = [each for each in lines["tpot int4"] if "over base" in each["case"]]
    assert ratios and all(each["shape"]["rounds"] >= 1 for each in ratios)


def test_a_job_without_time_says_what_it_left_out(tmp_path: Path) -> None:
    """What has begun ends; nothing else begins."""
    for job in every_job(tmp_path):
        if job.name in ("tpot none", "mixed", "profile"):
            found = [*job.run(DRY, CPU, TimeLeft.of(0.0))]
            left = [each for each in found if each["ok"] is None]
            assert left and all(each["error"].startswith("not run: ") for each in left), job.name


def test_what_a_job_compiled_is_said_even_if_it_fails() -> None:
    def work() -> Iterator[Line]:
        build._build("launcher")
        yield line("begun", 1.0, "x")
        raise ValueError

    build = import_module("triton.runtime.build")
    found = []
    with pytest.MonkeyPatch.context() as changes, pytest.raises(ValueError):
        changes.setattr(build, "_build", lambda name: name)
        for each in counted_compilations("job", work):
            found.append((each["case"], each["value"], each["ok"]))
    assert found == [("begun", 1.0, True), ("compiled in job/job", 1, False)]
    assert [*counted_compilations("job", list)][-1]["ok"] is True
