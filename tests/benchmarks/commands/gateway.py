"""The commands of what the gateway itself costs, with scripted engines and real stores."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from tests.benchmarks.admission import AdmissionShape, measure_admission
from tests.benchmarks.anonymous import AnonymousShape, measure_anonymous
from tests.benchmarks.bodies import BodiesShape, measure_bodies
from tests.benchmarks.gateway import GatewayShape, measure_gateway
from tests.benchmarks.journal import JournalShape, measure_journal
from tests.benchmarks.observers import measure_observers
from tests.benchmarks.throughput import ROUTES, ThroughputShape, measure_throughput

from loraplex.platform.bench.report import Report
from loraplex.platform.cli.bench import AsJson, Length, Out, run_bench
from loraplex.platform.processes.progress import Progress


def gateway(
    against: Annotated[str | None, typer.Option(help="An earlier commit, measured in turn.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Of each model in each round.")] = 100,
    connections: Annotated[int, typer.Option(min=1)] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each commit.")] = 120,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """CPU time and latency of a request in the gateway, with a scripted engine and real stores."""

    async def work(progress: Progress) -> Report:
        shape = GatewayShape(requests, connections, rounds)
        return await asyncio.to_thread(measure_gateway, shape, against)

    run_bench(work, out, as_json)


def throughput(
    route: Annotated[str, typer.Option(help=f"{', '.join(ROUTES)}.")] = "chat",
    rate: Annotated[
        float | None, typer.Option(min=1.0, help="Requests per second; default: search the highest.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="At that rate.")] = 60.0,
    p99_ms: Annotated[float, typer.Option(min=1.0, help="Bound of the gateway's own time.")] = 250.0,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Highest rate of small requests without an error through one gateway; client, engine and stores on the same cores."""
    if route not in ROUTES:
        raise typer.BadParameter(f"allowed are {', '.join(ROUTES)}", param_hint="--route")
    shape = ThroughputShape(route=route, rate=rate, seconds=seconds, p99_ms=p99_ms)
    run_bench(lambda progress: measure_throughput(shape, progress), out, as_json, uvloop.new_event_loop)


def observers(
    requests: Annotated[int, typer.Option(min=1, help="In each round.")] = 2000,
    connections: Annotated[int, typer.Option(min=1)] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Processes of each kind.")] = 3,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """CPU time of a request with nothing watching, then with access lines, metrics and traces in turn."""

    async def work(progress: Progress) -> Report:
        return await asyncio.to_thread(measure_observers, GatewayShape(requests, connections, rounds))

    run_bench(work, out, as_json)


def bodies(
    against: Annotated[str | None, typer.Option(help="An earlier commit, measured in turn.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Processes of each commit.")] = 3,
    repeats: Annotated[
        int, typer.Option(min=1, help="Of each case in a process; the least time counts.")
    ] = 15,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """CPU time of reading the bodies of `/v1` and of encoding its responses and streams."""

    async def work(progress: Progress) -> Report:
        return measure_bodies(BodiesShape(rounds, repeats), against)

    run_bench(work, out, as_json)


def admission(
    rate: Annotated[float, typer.Option(min=1.0, help="Arrivals per second.")] = 200.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each case in each round.")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    input_len: Length = 200,
    output_len: Length = 16,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Latency that admission adds to a request, with a real PostgreSQL and a real Valkey."""
    shape = AdmissionShape(
        rate=rate, seconds=seconds, rounds=rounds, input_len=input_len, output_len=output_len
    )
    run_bench(lambda progress: measure_admission(shape, progress), out, as_json, uvloop.new_event_loop)


def journal(
    writes: Annotated[int, typer.Option(min=256, help="Of each case in each round.")] = 4096,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    folder: Annotated[
        Path | None, typer.Option(help="On the disk to measure; default the temporary folder.")
    ] = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Rate and latency of durable writes to a gateway's journal, beside syncing as many bytes."""
    shape = JournalShape(writes, rounds, folder)
    run_bench(lambda progress: measure_journal(shape, progress), out, as_json, uvloop.new_event_loop)


def anonymous(
    part: Annotated[str, typer.Option(help="Flood only routes that have this in METHOD /path.")] = "",
    requests: Annotated[int, typer.Option(min=10, help="Counted, to each route, twice.")] = 64,
    starts: Annotated[int, typer.Option(min=1, help="Of sign-ins, in all turns.")] = 200,
    rate: Annotated[float, typer.Option(min=1.0, help="Completions per second beside them.")] = 50.0,
    seconds: Annotated[
        float, typer.Option(min=0.5, help="Of a turn of completions, with starts or alone.")
    ] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each kind.")] = 20,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """CPU time of the gateway per request without credentials, of every route, and its outbound calls; sign-ins beside /v1."""
    shape = AnonymousShape(
        part=part, requests=requests, starts=starts, rate=rate, seconds=seconds, rounds=rounds
    )
    run_bench(lambda progress: measure_anonymous(shape, progress), out, as_json)
