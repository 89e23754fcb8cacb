"""The commands of an installation of many processes: replicas, upgrades and faults."""

import asyncio
from typing import Annotated

import typer
from tests.benchmarks.chaos.__main__ import measure_in_namespace
from tests.benchmarks.chaos.faults import COMPONENTS, FAULTS
from tests.benchmarks.chaos.matrix import ChaosJob
from tests.benchmarks.rolling_upgrade import BEFORE, RollingShape, measure_rolling_upgrade

from loraplex.platform.bench.report import Report
from loraplex.platform.cli.bench import AsJson, Model, Out, resolve_model, run_bench
from loraplex.platform.processes.progress import Progress


def ray(model: Model = None, out: Out = None, as_json: AsJson = False) -> None:
    """Engine replicas on Ray Serve behind three gateways; engines are scripted, `model` gives the tokenizer."""

    async def work(progress: Progress) -> Report:
        from tests.benchmarks.ray_serve import measure_ray

        return await measure_ray(resolve_model(model, progress), progress)

    run_bench(work, out, as_json)


def placement(
    replicas: Annotated[int, typer.Option(min=2)] = 1000,
    adapters: Annotated[int, typer.Option(min=1)] = 100_000,
    requests: Annotated[int, typer.Option(min=100, help="Of each policy.")] = 120_000,
    rows: Annotated[int, typer.Option(min=1, help="Of a replica's batch.")] = 32,
    load: Annotated[float, typer.Option(min=0.01, help="Mean share of the rows in use.")] = 0.75,
    peak: Annotated[float, typer.Option(min=0.01, help="A second load, for the first two policies.")] = 0.85,
    zipf: Annotated[float, typer.Option(min=0.0, help="Exponent of the adapters' popularity.")] = 1.1,
    routers: Annotated[int, typer.Option(min=1)] = 4,
    seed: Annotated[int, typer.Option()] = 1,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Adapter hits, queue times and moved bytes of a simulated fleet, by the router's policy."""

    async def work(progress: Progress) -> Report:
        from tests.benchmarks.placement.comparison import compare_placement
        from tests.benchmarks.placement.traffic import FleetShape

        shape = FleetShape(
            replicas=replicas,
            adapters=adapters,
            requests=requests,
            rows=rows,
            load=load,
            zipf=zipf,
            routers=routers,
            seed=seed,
        )
        return compare_placement(shape, peak, progress)

    run_bench(work, out, as_json)


def several_engines(
    model: Model = None,
    rates: Annotated[bool, typer.Option(help="Also two engines of the model against one.")] = True,
    requests: Annotated[int, typer.Option(min=100, help="Of each policy.")] = 4000,
    rounds: Annotated[int, typer.Option(min=1, help="Of one engine and of two; the median counts.")] = 3,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Four engines with 200 adapters and room for 40 in each, or in all: hits by policy. Tokens of two engines against one."""

    async def work(progress: Progress) -> Report:
        from tests.benchmarks.several_engines import EnginesShape, measure_several_engines

        shapes = [EnginesShape(slots=slots, requests=requests) for slots in (40, 10)]
        return await measure_several_engines(
            shapes, resolve_model(model, progress) if rates else None, rounds, progress
        )

    run_bench(work, out, as_json)


def slow_engine(
    model: Model = None,
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 1.5,
    warm_up: Annotated[float, typer.Option(help="Seconds in which the slow engine has to be found.")] = 60.0,
    seconds: Annotated[float, typer.Option(help="Of the measurement after that.")] = 120.0,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """p99 TTFT over two engines of which one runs a third of the time, with ejection and without."""

    async def work(progress: Progress) -> Report:
        from tests.benchmarks.slow_engine import measure_slow_engine

        return await measure_slow_engine(resolve_model(model, progress), rate, warm_up, seconds, progress)

    run_bench(work, out, as_json)


def rolling_upgrade(
    against: Annotated[str, typer.Option(help="The commit that is replaced.")] = BEFORE,
    streams: Annotated[int, typer.Option(min=1, help="Running all the time.")] = 16,
    tokens: Annotated[int, typer.Option(min=10, help="Of each stream, 20 per second.")] = 60,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Streams, ledger and limits while two gateways and their engine of an earlier commit are replaced."""
    shape = RollingShape(streams=streams, tokens=tokens)
    run_bench(lambda progress: measure_rolling_upgrade(shape, against, progress), out, as_json)


def chaos(
    model: Model = None,
    fault: Annotated[list[str] | None, typer.Option(help=f"{', '.join(FAULTS)}; repeatable.")] = None,
    component: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(COMPONENTS)}; repeatable. Default all.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=3.0, max=120.0, help="Of each fault.")] = 12.0,
    scripted: Annotated[bool, typer.Option(help="Serve a script instead of the model.")] = True,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Every fault in every component of an installation under load: errors, recovery, ledger drift, quotas."""
    for chosen, known, option in ((fault, FAULTS, "--fault"), (component, COMPONENTS, "--component")):
        for name in set(chosen or ()) - set(known):
            raise typer.BadParameter(f"{name!r}: allowed are {', '.join(known)}", param_hint=option)

    async def work(progress: Progress) -> Report:
        job = ChaosJob(
            model=resolve_model(model, progress),
            faults=tuple(fault or FAULTS),
            components=tuple(component or COMPONENTS),
            seconds=seconds,
            scripted=scripted,
        )
        return await asyncio.to_thread(measure_in_namespace, job)

    run_bench(work, out, as_json)
