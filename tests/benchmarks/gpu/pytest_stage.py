"""The stage `tests`: the suite's tests that need a GPU, one line each, in a process that may die between two of them.

Invariant: `gpu_tests.ini` is the root of this run: no `conftest.py` above the engine's tests is loaded, and so nothing that
starts servers or databases is needed.
"""

import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from tests.benchmarks.gpu.children import LOST_DEVICE_EXIT
from tests.benchmarks.gpu.faults import answers
from tests.benchmarks.gpu.worker import Results, device_of

ROOT = Path(__file__).parents[3]
INI = Path(__file__).with_name("gpu_tests.ini")
FILES = (
    "tests/engine/test_engine_on_cuda.py",
    "tests/engine/lora/test_cuda_pool.py",
    *(
        f"tests/engine/kernels/triton/test_{name}.py"
        for name in (
            "elementwise",
            "folded_expand",
            "logit_masks",
            "paged_attention",
            "quantized_linear",
            "sgmv",
        )
    ),
    "tests/engine/kernels/test_fp8_linear.py",
)
"""Where tests marked `gpu` are, the most telling first."""
MERGES = tuple(
    f"tests/engine/kernels/triton/test_{name}.py::test_merges_see_every_split"
    for name in ("paged_attention", "quantized_linear")
)
"""The race of programs that merge: the last one to finish must see what all others wrote."""
NAMED = (*FILES[:2], *MERGES)
ALONE = FILES[1]
"""Its tests compare times, which others at once would disturb."""
OPTIONS = ("-c", str(INI), f"--rootdir={ROOT}", "-m", "gpu", "-p", "no:cacheprovider")


class Collector:
    """A plugin of pytest that keeps the names of the tests."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.nodeid for item in session.items]


class Reporter:
    """A plugin of pytest: runs the named tests, sends a line for each, and ends the process if one loses the device."""

    def __init__(self, results: Results, device: torch.device, names: Sequence[str]) -> None:
        self._results, self._device, self._names = results, device, frozenset(names)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._names]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._results.begin(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            ok = None if report.skipped else report.passed
            self._results.line({"stage": "tests", "case": report.nodeid, "ok": ok, "error": _reason(report)})

    def pytest_runtest_logfinish(self) -> None:
        if not answers(self._device):
            os._exit(LOST_DEVICE_EXIT)


def collect_tests(connection: Connection, is_dry: bool, targets: Sequence[str], names: Sequence[str]) -> None:
    """Send one line per test of these files or tests; the one case is the collection."""
    results, collector = Results(connection), Collector()
    results.begin(names[0])
    status = _run(targets, collector, "--collect-only")
    if status != pytest.ExitCode.OK:
        raise SystemExit(f"collecting the tests ended with {status!r}")
    for name in collector.names:
        results.line({"stage": "tests", "case": name, "ok": True, "error": None})


def run_tests(connection: Connection, is_dry: bool, names: Sequence[str]) -> None:
    """Run the named tests, in the order in which they are collected."""
    files = dict.fromkeys(name.partition("::")[0] for name in names)
    _run([*files], Reporter(Results(connection), device_of(is_dry), names))


def _run(targets: Sequence[str], plugin: object, *options: str) -> int:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(ROOT)
    return pytest.main([*OPTIONS, "-p", "no:terminal", *options, *targets], plugins=[plugin])


def _reason(report: pytest.TestReport) -> str | None:
    if report.passed:
        return None
    if report.skipped and isinstance(report.longrepr, tuple):
        return f"not run: {report.longrepr[2]}"
    return report.longreprtext.strip()[-600:]
