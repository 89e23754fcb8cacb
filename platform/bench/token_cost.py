"""`bench serve --price-per-hour`: what a million tokens cost, over rounds of one load, with a 95 % interval.

Invariant: the whole price of a round is charged to the tokens named: to prompts alone, to responses alone, or to both.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean, stdev
from typing import Final

from loraplex.platform.bench.latency_metrics import serving_metrics
from loraplex.platform.bench.report import BenchFailed, Case, Report
from loraplex.platform.bench.serve import ServerUnderLoad, ServeShape

COLUMNS: Final = ("per_million_input", "per_million_output", "per_million_total", "output_throughput")
ROUNDS: Final = 5
T_95: Final = 2.776
"""Two-sided 95 % quantile of Student's t (1908) for the mean of so many rounds."""


async def measure_cost(
    server: ServerUnderLoad, shape: ServeShape, price_per_hour: float, report: Report
) -> None:
    """Run `ROUNDS` rounds with prompts of their own, after one that does not count. Raises `BenchFailed`."""
    report.columns += COLUMNS
    costs: dict[str, list[float]] = {name: [] for name in COLUMNS[:3]}
    for index in range(ROUNDS + 1):
        result = await server.run(shape, shape.traffic.seed + 20_000 + index)
        figures = serving_metrics(result)
        if figures["failed"] or not figures["total_output_tokens"]:
            reason = next((each.error for each in result.completions if each.error is not None), "no tokens")
            raise BenchFailed(f"a round has no cost, since a request of it failed: {reason}")
        if not index:
            continue
        paid = price_per_hour * figures["duration"] / 3600 * 1e6
        tokens_in, tokens_out = figures["total_input_tokens"], figures["total_output_tokens"]
        for name, tokens in zip(costs, (tokens_in, tokens_out, tokens_in + tokens_out), strict=True):
            costs[name].append(paid / tokens)
        figure = {name: values[-1] for name, values in costs.items()} | figures
        report.cases.append(Case(f"round {index}", asdict(shape), figure))
    means = {name: fmean(values) for name, values in costs.items()}
    halves = {f"{name}_interval": half_interval(values) for name, values in costs.items()}
    report.cases.append(Case("mean of the rounds", asdict(shape), means | halves))
    for name in costs:
        report.notes.append(
            f"{name.replace('_', ' ')} tokens: {means[name]:.4f} ± {halves[f'{name}_interval']:.4f}"
            f" (95 %, {ROUNDS} rounds, {price_per_hour:g} per hour)"
        )


def half_interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean of `ROUNDS` values."""
    return T_95 * stdev(values) / math.sqrt(ROUNDS)
