"""What watching costs a request: nothing, then access lines, metrics and traces in turn, in one run of the gateway's measurement.

Invariant: the collector that gets the traces is in the measuring process, so its work does not count.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from statistics import median
from tempfile import TemporaryFile
from typing import Any, Final

from tests.benchmarks.checkout import CHECKOUT
from tests.benchmarks.gateway import BASE, Figures, GatewayShape, measure, serve, served
from tests.platform.engines.managed_engine import Managed
from tests.platform.web.otlp_receiver import receiving

from loraplex.platform.bench.report import Case, Ratio, Report
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.observability.access_log import log_request
from loraplex.platform.observability.metrics import Metrics
from loraplex.platform.observability.tracing import RequestTraces
from loraplex.platform.processes.logs import configure_logs

MODULE: Final = "tests.benchmarks.observers"
NOTHING, LINES, METRICS, TRACES = "nothing", "access lines", "and metrics", "and traces"
COLUMNS: Final = ("cpu_ms", "p50_ms", "p99_ms")
ADDED: Final = "added_cpu_us"
"""CPU time per request more than with nothing watching."""


def measure_observers(shape: GatewayShape) -> Report:
    """Measure all four in turn. Raises `BenchFailed`."""
    with receiving() as collector:
        kinds = {
            NOTHING: (),
            LINES: ("lines",),
            METRICS: ("lines", "metrics"),
            TRACES: ("lines", "metrics", collector.url),
        }
        runs: dict[str, list[Figures]] = {name: [] for name in kinds}
        for _ in range(shape.rounds):
            for name, arguments in kinds.items():
                with served(CHECKOUT, MODULE, *arguments) as serving:
                    runs[name].append(asyncio.run(measure(serving, BASE, shape)))
    return _report(shape, runs)


def _report(shape: GatewayShape, runs: dict[str, list[Figures]]) -> Report:
    report = Report("observers", (*COLUMNS, ADDED))
    figures = {
        name: {each: median(run[each] for run in found) for each in COLUMNS} for name, found in runs.items()
    }
    for name, figure in figures.items():
        added_us = 1000 * (figure["cpu_ms"] - figures[NOTHING]["cpu_ms"])
        report.cases.append(Case(name, asdict(shape), {**figure, ADDED: added_us}))
    for before, name in pairwise(figures):
        ratio = figures[name]["cpu_ms"] / figures[before]["cpu_ms"]
        report.ratios.append(Ratio(f"CPU time: {name} / {before}", ratio))
    return report


def observers(arguments: list[str]) -> list[Any]:
    """What watches the requests of a gateway that is started with these arguments: the first so many kinds."""
    metrics = Metrics(BASE, "0", 4096, EnginePool([Managed()]))
    found: list[list[Any]] = [[log_request], [metrics.http.record, metrics.usage.record]]
    if len(arguments) > len(found):
        found.append([RequestTraces(arguments[-1], "0").record])
    return [each for kind in found[: len(arguments)] for each in kind]


@contextmanager
def lines_in_a_file() -> Iterator[None]:
    """Log into a file, as a service does. Standard output is a pipe that is read for one line: more would fill it,
    and the gateway would stand still.
    """
    terminal = sys.stderr
    with TemporaryFile("w") as lines:
        sys.stderr = lines
        configure_logs("info")
        try:
            yield
        finally:
            sys.stderr = terminal


if __name__ == "__main__":
    with lines_in_a_file():
        asyncio.run(serve(observers(sys.argv[1:])))
