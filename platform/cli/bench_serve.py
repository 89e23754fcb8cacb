"""The options of `loraplex bench serve` that need parsing, and the measurement that they ask for."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, cast, get_args

import typer

from loraplex.platform.bench.latency_metrics import parse_goodput
from loraplex.platform.bench.mixes import MIXES, Mix
from loraplex.platform.bench.rate_search import Objective, find_rate, parse_slo
from loraplex.platform.bench.report import Report
from loraplex.platform.bench.serve import Measure, ServerUnderLoad, ServeShape, Target, serve_report
from loraplex.platform.bench.token_cost import measure_cost
from loraplex.platform.bench.workload import Distribution
from loraplex.platform.cli.plan_cost import MICRO, parse_price
from loraplex.platform.startup_errors import SettingsError

BaseUrl = Annotated[str | None, typer.Option(help="A running server; default: start one.")]
ApiKey = Annotated[str | None, typer.Option(help="Its key.")]
Targets = Annotated[
    list[str] | None, typer.Option("--target", help="A model or adapter to request there; repeatable.")
]
MixName = Annotated[str | None, typer.Option(help=f"Lengths and tools of {', '.join(MIXES)}.")]
Goodput = Annotated[str | None, typer.Option(help="Objectives in ms: ttft:500,tpot:60.")]
Slo = Annotated[str | None, typer.Option(help="Objectives of --find-rate: ttft_p95=500ms,itl_p95=80ms.")]
FindRate = Annotated[
    bool, typer.Option("--find-rate", help="Find the highest rate that holds --slo, from --rate on.")
]
PricePerHour = Annotated[
    str | None, typer.Option(help="Price of the machine, such as 2.5: adds the cost of a million tokens.")
]


def parse_targets(names: list[str] | None, api_key: str | None) -> list[Target]:
    """The targets on a running server. Raises `SettingsError`."""
    if api_key is None or not names:
        raise SettingsError("--base-url needs --api-key and at least one --target MODEL")
    return [Target(name, api_key) for name in names]


def parse_goals(slo: str | None, find_highest: bool) -> Sequence[Objective]:
    """What the highest rate has to hold; empty if it is not asked for. Raises `SettingsError`."""
    if find_highest != (slo is not None):
        raise SettingsError("--find-rate needs --slo, such as --slo ttft_p95=500ms, and --slo --find-rate")
    return () if slo is None else parse_slo(slo)


def parse_mix(name: str | None) -> Mix | None:
    """Raises `SettingsError`."""
    if name is not None and name not in MIXES:
        raise SettingsError(f"--mix {name!r}: allowed is {', '.join(MIXES)}")
    return None if name is None else MIXES[name]


def parse_distribution(name: str) -> Distribution:
    """Raises `SettingsError`."""
    if name not in get_args(Distribution):
        raise SettingsError(f"--distribution {name!r}: allowed is {', '.join(get_args(Distribution))}")
    return cast(Distribution, name)


def measure_of(
    shape: ServeShape,
    goodput: str | None,
    goals: Sequence[Objective],
    price_per_hour: str | None,
) -> Measure:
    """What is asked of a server: one load, the highest rate, or the cost of tokens, at that rate if both.

    Raises `SettingsError`.
    """
    objectives = parse_goodput(goodput)
    price = parse_price(price_per_hour) / MICRO if price_per_hour else None

    async def measure(server: ServerUnderLoad) -> Report:
        report, load = Report("serve", ()), shape
        if goals:
            rate = await find_rate(server, shape, goals, report, server.progress)
            load = replace(shape, traffic=replace(shape.traffic, rate=rate))
        if price is not None:
            await measure_cost(server, load, price, report)
        return report if report.cases else serve_report(shape, await server.run(shape), objectives)

    return measure
