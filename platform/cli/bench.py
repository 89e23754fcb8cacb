"""`loraplex bench`: load tests of a server that the command starts, or of a running one.

Every command prints its cases and ratios, and writes one JSON line for each to the folder `--out`.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from loraplex.engine.checkpoints.model_files import locate_model
from loraplex.engine.errors import EngineError
from loraplex.platform.bench.many_adapters import DTYPE_BYTES, ManyAdaptersShape, measure_many_adapters
from loraplex.platform.bench.prefix_cache import PrefixCacheShape, measure_prefix_cache
from loraplex.platform.bench.report import RESULTS, Report, checkout_root, write_lines
from loraplex.platform.bench.serve import ServeShape, Traffic, load_local_server, load_running_server
from loraplex.platform.bench.structured_output import StructuredOutputShape, measure_structured_output
from loraplex.platform.cli.bench_serve import (
    ApiKey,
    BaseUrl,
    FindRate,
    Goodput,
    MixName,
    PricePerHour,
    Slo,
    Targets,
    measure_of,
    parse_distribution,
    parse_goals,
    parse_mix,
    parse_targets,
)
from loraplex.platform.cli.command_context import end_at_sigterm, exit_codes
from loraplex.platform.config import load_settings
from loraplex.platform.demo.model import ensure_demo_model
from loraplex.platform.processes.progress import Progress, shown_progress
from loraplex.platform.startup_errors import SettingsError, StartError

app = typer.Typer(
    name="bench", help="Measure speed. Quiet machines give steady figures.", no_args_is_help=True
)

Out = Annotated[
    Path | None,
    typer.Option(help="Folder of the JSON lines; default tests/benchmarks/results in a checkout."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON lines instead of tables.")]
Model = Annotated[str | None, typer.Option(help="A folder or hub id; default the demo model.")]
Dtype = Annotated[str, typer.Option(help=f"{', '.join(DTYPE_BYTES)}.")]


def parse_settings(pairs: list[str] | None) -> dict[str, str]:
    """Settings of the started server by name, from `NAME=VALUE`. Raises `typer.BadParameter`."""
    found = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{pair!r}: allowed is NAME=VALUE")
        found[name.lower()] = value
    return found


def _checked(pairs: list[str] | None) -> list[str] | None:
    """Refuse a wrong setting with the other options, before a model is fetched."""
    parse_settings(pairs)
    return pairs


Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--setting",
        callback=_checked,
        help="NAME=VALUE for the started server, as in loraplex.toml; repeatable.",
    ),
]
Repeats = Annotated[int, typer.Option(min=1, help="Repeats; the median counts.")]
Count = Annotated[int, typer.Option(min=1)]
Length = Annotated[int, typer.Option(min=1, help="In tokens.")]
Rank = Annotated[int, typer.Option(min=1, max=256)]
Zipf = Annotated[float, typer.Option(min=0.0, help="Exponent.")]
Share = Annotated[float, typer.Option(min=0.0, max=1.0)]


@app.command("serve")
def serve_load(
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    target: Targets = None,
    model: Model = None,
    dtype: Dtype = "bfloat16",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 16,
    num_requests: Count = 64,
    input_len: Length = 60,
    prompt: Annotated[str | None, typer.Option(help="This text instead of drawn tokens.")] = None,
    output_len: Length = 64,
    adapters: Annotated[int, typer.Option(min=0, help="Random adapters to register; 0: base model.")] = 0,
    rank: Rank = 16,
    tenants: Annotated[int, typer.Option(min=1, help="Tenants that own them in turn.")] = 1,
    distribution: Annotated[str, typer.Option(help="uniform, zipf or distinct.")] = "uniform",
    zipf: Zipf = 1.1,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Open loop: arrivals per second.")] = None,
    prefix_share: Share = 0.0,
    cancel_share: Share = 0.0,
    mix: MixName = None,
    goodput: Goodput = None,
    slo: Slo = None,
    find_highest: FindRate = False,
    price_per_hour: PricePerHour = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    setting: Setting = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Load a server over HTTP and measure throughput, TTFT, TPOT and ITL."""

    async def work(progress: Progress) -> Report:
        drawn, lengths = parse_distribution(distribution), parse_mix(mix)
        shape = ServeShape(
            concurrency=concurrency,
            num_requests=num_requests,
            input_len=input_len,
            output_len=output_len,
            adapters=adapters,
            rank=rank,
            tenants=tenants,
            traffic=Traffic(drawn, zipf, rate, prefix_share, cancel_share, seed, prompt, lengths),
        )
        goals = parse_goals(slo, find_highest)
        measure = measure_of(shape, goodput, goals, price_per_hour)
        if base_url is not None:
            return await load_running_server(base_url, parse_targets(target, api_key), measure, progress)
        own = {"dtype": dtype, **parse_settings(setting)}
        return await load_local_server(resolve_model(model, progress), own, shape, measure, progress)

    run_bench(work, out, as_json)


@app.command()
def lora(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    rank: Rank = 16,
    steps: Annotated[int, typer.Option(min=1, help="Counted steps of each batch.")] = 64,
    input_len: Length = 60,
    rows: Annotated[list[str] | None, typer.Option("--rows", help="ROWS/ADAPTERS; repeatable.")] = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Cost of LoRA per decode step, without HTTP: mixed rows against base rows."""
    with exit_codes():
        pairs = [parse_rows(text) for text in rows or ("16/8", "1/1", "16/16")]

    async def work(progress: Progress) -> Report:
        from loraplex.platform.bench.lora import MODULE, LoraJob, LoraShape, run_in_subprocess

        shapes = [LoraShape(count, adapters, rank, input_len, steps) for count, adapters in pairs]
        job = LoraJob(resolve_model(model, progress), dtype, device, shapes)
        progress("measuring decode steps")
        return run_in_subprocess(MODULE, job)

    run_bench(work, out, as_json)


@app.command()
def determinism(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    rows: Annotated[int, typer.Option(min=2, help="Requests of the base, and of adapters.")] = 8,
    input_len: Annotated[int, typer.Option(min=34, help="In tokens; half is a response.")] = 90,
    output_len: Length = 64,
    adapters: Annotated[int, typer.Option(min=0, help="Random adapters in turn; 0: base model only.")] = 4,
    rank: Rank = 16,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Responses that company, step budget, cached prefixes or preemptions change, by default and with `deterministic`."""

    async def work(progress: Progress) -> Report:
        from loraplex.platform.bench.determinism import MODULE, DeterminismJob
        from loraplex.platform.bench.lora import run_in_subprocess

        shape = (dtype, device, rows, input_len, output_len, adapters, rank)
        job = DeterminismJob(resolve_model(model, progress), *shape)
        progress("repeating requests")
        return run_in_subprocess(MODULE, job)

    run_bench(work, out, as_json)


@app.command()
def adapters(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    registered: Count = 300,
    resident: Annotated[int, typer.Option(min=1, help="Adapters of mean size the budget holds.")] = 16,
    zipf: Zipf = 1.1,
    num_requests: Count = 200,
    concurrency: Count = 16,
    input_len: Length = 60,
    output_len: Length = 64,
    repeats: Repeats = 2,
    samples: Annotated[int, typer.Option(min=0, help="Outputs repeated alone.")] = 20,
    setting: Setting = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Traffic on more adapters than the residency budget holds, against traffic on resident ones."""
    shape = ManyAdaptersShape(
        registered=registered,
        resident=resident,
        zipf=zipf,
        requests=num_requests,
        concurrency=concurrency,
        input_len=input_len,
        output_len=output_len,
        repeats=repeats,
        samples=samples,
        dtype=dtype,
    )
    run_bench(
        lambda progress: measure_many_adapters(
            resolve_model(model, progress), shape, parse_settings(setting), progress
        ),
        out,
        as_json,
    )


@app.command()
def cache(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    prefix_len: Length = 1000,
    prefixes: Annotated[int, typer.Option(min=1, help="Distinct ones; the median counts.")] = 5,
    setting: Setting = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time to first token with a cached prefix, without, and for another tenant."""
    shape = PrefixCacheShape(prefix_len=prefix_len, prefixes=prefixes, dtype=dtype)
    run_bench(
        lambda progress: measure_prefix_cache(
            resolve_model(model, progress), shape, parse_settings(setting), progress
        ),
        out,
        as_json,
    )


@app.command()
def grammar(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    rows: Annotated[int, typer.Option(min=1, help="Rows with grammars, and without.")] = 16,
    output_len: Annotated[int, typer.Option(min=32, help="Maximum tokens of a row.")] = 128,
    repeats: Repeats = 3,
    setting: Setting = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Output rate of rows with JSON schemas or tools, against the same rows without."""
    shape = StructuredOutputShape(rows=rows, max_tokens=output_len, repeats=repeats, dtype=dtype)
    run_bench(
        lambda progress: measure_structured_output(
            resolve_model(model, progress), shape, parse_settings(setting), progress
        ),
        out,
        as_json,
    )


def run_bench(
    work: Callable[[Progress], Coroutine[Any, Any, Report]],
    out: Path | None,
    as_json: bool,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Measure, print and write the result. SIGTERM stops the started server like Ctrl-C does.

    `loop_factory` is the event loop of a gateway, for a benchmark that runs part of a gateway in this process.
    """

    async def within() -> Report:
        end_at_sigterm()
        return await work(progress)

    with exit_codes(), shown_progress() as progress:
        try:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                report = runner.run(within())
        except EngineError as error:
            raise StartError(str(error)) from error
        except asyncio.CancelledError:
            raise StartError("stopped before the end; nothing was written") from None
    root = checkout_root()
    folder = out or (root / RESULTS if root else None)
    if as_json or folder is None:
        for line in report.lines():
            typer.echo(json.dumps(line))
    if not as_json:
        report.print(Console())
    if folder is not None:
        progress(f"wrote {write_lines(report, folder)}")


def resolve_model(model: str | None, progress: Progress | None = None) -> str:
    """The folder or file of the model on this disk. Raises `ModelError` or `StartError`."""
    if model is None:
        return str(ensure_demo_model(load_settings().data_dir, progress))
    return str(locate_model(model))


def parse_rows(text: str) -> tuple[int, int]:
    """Rows and adapters of `ROWS/ADAPTERS`. Raises `SettingsError`."""
    rows, _, adapters = text.partition("/")
    if not (rows.isdecimal() and adapters.isdecimal() and 1 <= int(adapters) <= int(rows)):
        raise SettingsError(f"--rows {text!r}: allowed is ROWS/ADAPTERS with at least one row per adapter")
    return int(rows), int(adapters)
