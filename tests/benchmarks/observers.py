"""What watching costs a request: nothing, access lines and metrics, and traces as well, in one run of the gateway's measurement.

Invariant: the collector that gets the traces is in the measuring process, so its work does not count.
"""

import asyncio
import sys
from dataclasses import asdict
from statistics import median
from typing import Any, Final

from tests.benchmarks.checkout import CHECKOUT
from tests.benchmarks.gateway import BASE, Figures, GatewayShape, measure, serve, served
from tests.platform.api.otlp_receiver import receiving
from tests.platform.engines.managed_engine import Managed

from loraplex.platform.bench.report import Case, Ratio, Report
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.observability.access_log import log_request
from loraplex.platform.observability.metrics import Metrics
from loraplex.platform.observability.tracing import RequestTraces
from loraplex.platform.processes.logs import configure_logs

MODULE: Final = "tests.benchmarks.observers"
NOTHING, LINES, TRACES = "nothing watches", "access lines and metrics", "traces as well"
COLUMNS: Final = ("cpu_ms", "p50_ms", "p99_ms")


def measure_observers(shape: GatewayShape) -> Report:
    """Measure all three in turn. Raises `BenchFailed`."""
    with receiving() as collector:
        kinds = {NOTHING: (), LINES: ("lines",), TRACES: ("lines", collector.url)}
        runs: dict[str, list[Figures]] = {name: [] for name in kinds}
        for _ in range(shape.rounds):
            for name, arguments in kinds.items():
                with served(CHECKOUT, MODULE, *arguments) as serving:
                    runs[name].append(asyncio.run(measure(serving, BASE, shape)))
    report = Report("observers", COLUMNS)
    figures = {
        name: {each: median(run[each] for run in found) for each in COLUMNS} for name, found in runs.items()
    }
    for name, figure in figures.items():
        report.cases.append(Case(name, asdict(shape), figure))
    for name, before in ((LINES, NOTHING), (TRACES, LINES)):
        ratio = figures[name]["cpu_ms"] / figures[before]["cpu_ms"]
        report.ratios.append(Ratio(f"CPU time: {name} / {before}", ratio))
    return report


def observers(arguments: list[str]) -> list[Any]:
    """What watches the requests of a gateway that is started with these arguments."""
    if not arguments:
        return []
    configure_logs("info")
    metrics = Metrics(BASE, "0", 4096, EnginePool([Managed()]))
    found: list[Any] = [log_request, metrics.http.record, metrics.usage.record]
    return found if len(arguments) == 1 else [*found, RequestTraces(arguments[1], "0").record]


if __name__ == "__main__":
    asyncio.run(serve(observers(sys.argv[1:])))
