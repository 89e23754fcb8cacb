"""`python -m tests.benchmarks`: one command for each measurement behind this repository's figures.

Invariant: each command writes result lines with the fields of earlier ones, so that figures stay comparable.
"""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from tests.benchmarks import kernel_commands
from tests.benchmarks.admission import AdmissionShape, measure_admission
from tests.benchmarks.attackers.registry import ATTACKERS
from tests.benchmarks.attacks import AttackShape, measure_attacks
from tests.benchmarks.bodies import BodiesShape, measure_bodies
from tests.benchmarks.chaos.__main__ import measure_in_namespace
from tests.benchmarks.chaos.faults import COMPONENTS, FAULTS
from tests.benchmarks.chaos.matrix import ChaosJob
from tests.benchmarks.chunked_prefill import ChunkedPrefillShape, measure_chunked_prefill
from tests.benchmarks.console import measure_console
from tests.benchmarks.fair_share import FairShareShape, measure_fair_share
from tests.benchmarks.gateway import GatewayShape, measure_gateway
from tests.benchmarks.journal import JournalShape, measure_journal
from tests.benchmarks.kernels.shapes import LAYER_SHAPES
from tests.benchmarks.ledger import LedgerLoad, measure_ledger
from tests.benchmarks.ledger_rows import LedgerShape
from tests.benchmarks.noisy_neighbours import NoisyNeighboursShape, measure_noisy_neighbours
from tests.benchmarks.observers import measure_observers
from tests.benchmarks.peft_comparison import PeftComparisonShape, compare_with_peft
from tests.benchmarks.rolling_upgrade import BEFORE, RollingShape, measure_rolling_upgrade
from tests.benchmarks.throughput import ROUTES, ThroughputShape, measure_throughput

from loraplex.platform.bench.report import RESULTS, Report, available_cores, checkout_root
from loraplex.platform.cli.bench import (
    AsJson,
    Dtype,
    Length,
    Model,
    Out,
    Rank,
    Repeats,
    Setting,
    parse_settings,
    print_progress,
    resolve_model,
    run_bench,
)
from loraplex.platform.cli.command_context import exit_codes
from loraplex.platform.startup_errors import SettingsError

PAGE = Path("deploy", "benchmarks.html")

app = typer.Typer(
    name="python -m tests.benchmarks",
    help="Measure what the README's figures show. Quiet machines give steady figures.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command()(kernel_commands.attention)
app.command()(kernel_commands.gemm)
app.command("lora-kernels")(kernel_commands.lora_kernels)


@app.command()
def peft(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 16,
    adapters: Annotated[int, typer.Option(min=1, help="Random adapters to register.")] = 8,
    rank: Rank = 16,
    input_len: Length = 60,
    output_len: Length = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of both; the median counts.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="Of the peer; default all cores.")] = None,
    setting: Setting = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Output rate over HTTP against `transformers` + PEFT: mixed adapters, one row, base model."""
    shape = PeftComparisonShape(
        rows=concurrency,
        adapters=adapters,
        rank=rank,
        input_len=input_len,
        output_len=output_len,
        repeats=repeats,
        threads=threads or available_cores(),
        dtype=dtype,
    )
    run_bench(
        lambda: compare_with_peft(resolve_model(model), shape, parse_settings(setting), print_progress),
        out,
        as_json,
    )


@app.command()
def quantization(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    device: kernel_commands.Device = "auto",
    scheme: Annotated[list[str] | None, typer.Option(help="int8, int4 or fp8; repeatable.")] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Of a decode step; repeatable.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Counted steps of each model.")] = 64,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Decode steps and prompts of a quantized base model against the unquantized one."""

    async def work() -> Report:
        from tests.benchmarks.quantization import QuantizationJob, measure_in_subprocess

        schemes = scheme or ["int8", "int4"]
        job = QuantizationJob(resolve_model(model), dtype, device, schemes, rows or [1, 16], steps)
        return measure_in_subprocess(job)

    run_bench(work, out, as_json)


@app.command()
def decode(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    quantization: Annotated[list[str] | None, typer.Option(help="none, int8 or int4; repeatable.")] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Of a decode step; repeatable.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Counted steps of each round.")] = 64,
    repeats: Repeats = 3,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Decode steps on a CPU against reading the weights, alone and beside a busy process."""

    async def work() -> Report:
        from tests.benchmarks.decode import DecodeJob, measure_in_subprocess

        formats = quantization or ["none", "int8"]
        job = DecodeJob(resolve_model(model), dtype, formats, rows or [1, 16], steps, repeats)
        return measure_in_subprocess(job)

    run_bench(work, out, as_json)


@app.command("grammar-masks")
def grammar_masks(
    model: Model = None,
    mask_rows: Annotated[int, typer.Option(min=1, help="Matchers whose masks are filled per step.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Counted steps.")] = 200,
    vocabulary: Annotated[int, typer.Option(min=512, help="Tokens of the larger vocabulary.")] = 131_072,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Compile, fill, advance and apply grammar masks, per backend and vocabulary size."""

    async def work() -> Report:
        from tests.benchmarks.grammar_masks import MaskJob, MaskShape, measure_in_subprocess

        shape = MaskShape(rows=mask_rows, steps=steps, large=vocabulary)
        return measure_in_subprocess(MaskJob(resolve_model(model), shape))

    run_bench(work, out, as_json)


@app.command()
def steps(
    shape: Annotated[str, typer.Option(help=f"Widths of {', '.join(LAYER_SHAPES)}.")] = "llama-3-8b",
    step_rows: Annotated[int, typer.Option("--rows", min=8, help="Decoding rows.")] = 64,
    tokens: Annotated[int, typer.Option(min=128, max=2048, help="Tokens of a mixed step.")] = 1024,
    repeats: Repeats = 20,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Launches and host time of a GPU's steps, launched kernel by kernel and replayed; needs no GPU."""

    async def work() -> Report:
        from tests.benchmarks.steps import StepsShape, measure_steps

        return measure_steps(StepsShape(shape, step_rows, tokens, repeats))

    if shape not in LAYER_SHAPES:
        raise typer.BadParameter(f"must be one of {', '.join(LAYER_SHAPES)}", param_hint="--shape")
    run_bench(work, out, as_json)


@app.command("noisy-neighbours")
def noisy_neighbours(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    neighbours: Annotated[int, typer.Option(min=1, help="Plain rows next to hostile grammars.")] = 8,
    output_len: Annotated[int, typer.Option(min=64, help="Tokens of a plain row.")] = 256,
    repeats: Repeats = 3,
    setting: Setting = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Inter-token latency of plain rows while another tenant sends hostile grammars."""
    shape = NoisyNeighboursShape(rows=neighbours, output_len=output_len, repeats=repeats, dtype=dtype)
    run_bench(
        lambda: measure_noisy_neighbours(
            resolve_model(model), shape, parse_settings(setting), print_progress
        ),
        out,
        as_json,
    )


@app.command("fair-share")
def fair_share(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    seconds: Annotated[float, typer.Option(min=5.0, help="Of each case in each round.")] = 20.0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    load: Annotated[
        float, typer.Option(min=0.01, max=0.5, help="Of the quiet tenant, of the capacity.")
    ] = 0.4,
    setting: Setting = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """TTFT of a tenant beside one that offers ten times its share; shares of tenants that are both backlogged."""
    shape = FairShareShape(seconds=seconds, rounds=rounds, quiet_load=load, dtype=dtype)
    run_bench(
        lambda: measure_fair_share(resolve_model(model), shape, parse_settings(setting), print_progress),
        out,
        as_json,
    )


@app.command()
def ray(model: Model = None, out: Out = None, as_json: AsJson = False) -> None:
    """Engine replicas on Ray Serve behind three gateways; engines are scripted, `model` gives the tokenizer."""

    async def work() -> Report:
        from tests.benchmarks.ray_serve import measure_ray

        return await measure_ray(resolve_model(model), print_progress)

    run_bench(work, out, as_json)


@app.command()
def attacks(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    attack: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(ATTACKERS)}; repeatable. Default all.")
    ] = None,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests per second of the other tenant.")] = 4.0,
    seconds: Annotated[float, typer.Option(min=1.0, help="Of each case in each round.")] = 20.0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    setting: Setting = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """TTFT and errors of one tenant while another one attacks the server, against the same attacker at a stub."""
    names = tuple(attack or ATTACKERS)
    for name in set(names) - set(ATTACKERS):
        raise typer.BadParameter(f"{name!r}: allowed are {', '.join(ATTACKERS)}", param_hint="--attack")
    shape = AttackShape(attacks=names, rate=rate, seconds=seconds, rounds=rounds, dtype=dtype)
    run_bench(
        lambda: measure_attacks(resolve_model(model), shape, parse_settings(setting), print_progress),
        out,
        as_json,
    )


@app.command()
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

    async def work() -> Report:
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
        return compare_placement(shape, peak, print_progress)

    run_bench(work, out, as_json)


@app.command("chunked-prefill")
def chunked_prefill(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    rows: Annotated[int, typer.Option(min=1, help="Streaming rows.")] = 8,
    long_len: Annotated[int, typer.Option(min=1, help="Tokens of the long prompt.")] = 2000,
    output_len: Annotated[int, typer.Option(min=32, help="Of the streaming rows.")] = 256,
    repeats: Repeats = 3,
    setting: Setting = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Inter-token latency of streaming rows while a long prompt arrives, with chunked prefill and without."""
    shape = ChunkedPrefillShape(
        rows=rows, long_len=long_len, output_len=output_len, repeats=repeats, dtype=dtype
    )
    run_bench(
        lambda: measure_chunked_prefill(resolve_model(model), shape, parse_settings(setting), print_progress),
        out,
        as_json,
    )


@app.command()
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
    run_bench(lambda: measure_admission(shape, print_progress), out, as_json, uvloop.new_event_loop)


@app.command()
def ledger(
    rows: Annotated[int, typer.Option(min=1000, help="Rows to load.")] = 5_000_000,
    months: Annotated[int, typer.Option(min=4, max=24, help="Over which they are spread.")] = 6,
    rate: Annotated[float, typer.Option(min=1.0, help="Settled rows per second.")] = 500.0,
    seconds: Annotated[float, typer.Option(min=1.0, help="Of each load.")] = 20.0,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """A usage query, a dropped month and settlements with millions of rows in a PostgreSQL of its own."""
    shape, load = LedgerShape(rows=rows, months=months), LedgerLoad(rate=rate, seconds=seconds)
    run_bench(lambda: measure_ledger(shape, load, print_progress), out, as_json, uvloop.new_event_loop)


@app.command()
def console(
    rows: Annotated[int, typer.Option(min=1000, help="Rows of the ledger.")] = 5_000_000,
    months: Annotated[int, typer.Option(min=4, max=24, help="Over which they are spread.")] = 6,
    tenants: Annotated[int, typer.Option(min=1, help="The first has a fifth of the rows.")] = 20,
    views: Annotated[int, typer.Option(min=2, help="Of each page.")] = 30,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Server time, statements and first load of each page of the console with millions of rows, in stores of its own."""
    shape = LedgerShape(rows=rows, months=months, tenants=tenants)
    run_bench(lambda: measure_console(shape, views, print_progress), out, as_json, uvloop.new_event_loop)


@app.command()
def gateway(
    against: Annotated[str | None, typer.Option(help="An earlier commit, measured in turn.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Of each model in each round.")] = 2000,
    connections: Annotated[int, typer.Option(min=1)] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Processes of each commit.")] = 3,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """CPU time and latency of a request in the gateway, with a scripted engine and real stores."""

    async def work() -> Report:
        shape = GatewayShape(requests, connections, rounds)
        return await asyncio.to_thread(measure_gateway, shape, against)

    run_bench(work, out, as_json)


@app.command("rolling-upgrade")
def rolling_upgrade(
    against: Annotated[str, typer.Option(help="The commit that is replaced.")] = BEFORE,
    streams: Annotated[int, typer.Option(min=1, help="Running all the time.")] = 16,
    tokens: Annotated[int, typer.Option(min=10, help="Of each stream, 20 per second.")] = 60,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Streams, ledger and limits while two gateways and their engine of an earlier commit are replaced."""
    shape = RollingShape(streams=streams, tokens=tokens)
    run_bench(lambda: measure_rolling_upgrade(shape, against, print_progress), out, as_json)


@app.command()
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
    run_bench(lambda: measure_throughput(shape, print_progress), out, as_json, uvloop.new_event_loop)


@app.command()
def observers(
    requests: Annotated[int, typer.Option(min=1, help="In each round.")] = 2000,
    connections: Annotated[int, typer.Option(min=1)] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Processes of each kind.")] = 3,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """CPU time of a request with nothing watching, then with access lines, metrics and traces in turn."""

    async def work() -> Report:
        return await asyncio.to_thread(measure_observers, GatewayShape(requests, connections, rounds))

    run_bench(work, out, as_json)


@app.command()
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

    async def work() -> Report:
        return measure_bodies(BodiesShape(rounds, repeats), against)

    run_bench(work, out, as_json)


@app.command()
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
    run_bench(lambda: measure_journal(shape, print_progress), out, as_json, uvloop.new_event_loop)


@app.command()
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

    async def work() -> Report:
        job = ChaosJob(
            model=resolve_model(model),
            faults=tuple(fault or FAULTS),
            components=tuple(component or COMPONENTS),
            seconds=seconds,
            scripted=scripted,
        )
        return await asyncio.to_thread(measure_in_namespace, job)

    run_bench(work, out, as_json)


@app.command("report")
def results_page(
    results: Annotated[
        Path | None, typer.Option(help="Folder of JSON lines; default tests/benchmarks/results.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help=f"The page; default {PAGE} of a checkout.")] = None,
) -> None:
    """Render the result lines as one HTML page, with rooflines."""
    from tests.benchmarks.results_page import read_lines, render

    root = checkout_root()
    with exit_codes():
        if root is None and (results is None or to is None):
            raise SettingsError("outside a checkout --results and --to are needed")
        folder, target = results or Path(root or "", RESULTS), to or Path(root or "", PAGE)
        lines = read_lines(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render(lines), encoding="utf-8")
    print_progress(f"wrote {target}: {len(lines)} lines of {folder}")


if __name__ == "__main__":
    app()
