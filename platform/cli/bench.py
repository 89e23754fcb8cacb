"""`loraplex bench`: the load generator and the benchmarks behind the README's figures.

Every command prints its ratios, measured in one run, and writes one JSON line per case to --out.
"""

from functools import partial
from typing import Annotated, cast, get_args

import typer
import uvloop
from tests.benchmarks.__main__ import attention, gemm, measure_lora_kernels
from tests.benchmarks.admission import AdmissionShape, measure_admission
from tests.benchmarks.bench_page import page
from tests.benchmarks.chunked_prefill import LongPromptShape, measure_long_prompt
from tests.benchmarks.noisy_neighbours import NeighbourShape, measure_neighbours
from tests.benchmarks.peft_comparison import SpeedShape, compare_with_peft

from loraplex.engine.checkpoints.model_files import locate_model
from loraplex.platform.bench.latency_metrics import parse_objectives
from loraplex.platform.bench.many_adapters import ITEM_BYTES, ManyShape, measure_many
from loraplex.platform.bench.prefix_cache import PrefixShape, measure_prefix_cache
from loraplex.platform.bench.report import Report, available_cores
from loraplex.platform.bench.serve import LoadShape, Target, Traffic, load_foreign, load_own
from loraplex.platform.bench.structured_output import RateShape, measure_rate
from loraplex.platform.bench.workload import Distribution
from loraplex.platform.cli.bench_running import AsJson, Out, run_bench, say
from loraplex.platform.cli.command_context import exit_codes
from loraplex.platform.config import load_settings
from loraplex.platform.demo.model import ensure_demo_model
from loraplex.platform.startup_errors import SettingsError

app = typer.Typer(
    name="bench", help="Measure speed. Quiet machines give steady figures.", no_args_is_help=True
)
app.command()(attention)
app.command()(gemm)
app.command("report")(page)
GRAMMAR_PARTS = ("rate", "masks", "neighbours")

ComparePeft = Annotated[bool, typer.Option("--compare-peft", help="The matrix against transformers + PEFT.")]
BaseUrl = Annotated[str | None, typer.Option(help="A running server; default: start one.")]
ApiKey = Annotated[str | None, typer.Option(help="Its key.")]
Targets = Annotated[
    list[str] | None, typer.Option("--target", help="A model or adapter to request there; repeatable.")
]
Model = Annotated[str | None, typer.Option(help="A folder or hub id; default the demo model.")]
Dtype = Annotated[str, typer.Option(help=f"{', '.join(ITEM_BYTES)}.")]
Setting = Annotated[
    list[str] | None,
    typer.Option("--setting", help="NAME=VALUE for the started server, as in loraplex.toml; repeatable."),
]
Repeats = Annotated[int, typer.Option(min=1, help="Repeats; the median counts.")]
Count = Annotated[int, typer.Option(min=1)]
Length = Annotated[int, typer.Option(min=1, help="In tokens.")]
Rank = Annotated[int, typer.Option(min=1, max=256)]
Zipf = Annotated[float, typer.Option(min=0.0, help="Exponent.")]
Share = Annotated[float, typer.Option(min=0.0, max=1.0)]


@app.command("serve")
def serve_load(
    compare_peft: ComparePeft = False,
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
    goodput: Annotated[str | None, typer.Option(help="Objectives in ms: ttft:500,tpot:60.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of --compare-peft.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="Of the peer; default all cores.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    setting: Setting = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Load a server over HTTP, or compare with transformers + PEFT."""

    async def work() -> Report:
        lengths = {"input_len": input_len, "output_len": output_len, "rank": rank}
        if compare_peft:
            peer_threads, some = threads or available_cores(), adapters or 8
            matrix = SpeedShape(
                rows=concurrency, adapters=some, repeats=repeats, threads=peer_threads, dtype=dtype, **lengths
            )
            return await compare_with_peft(_located(model), matrix, _settings(setting), say)
        traffic = Traffic(_distribution(distribution), zipf, rate, prefix_share, cancel_share, seed, prompt)
        shape = LoadShape(
            concurrency=concurrency,
            num_requests=num_requests,
            adapters=adapters,
            tenants=tenants,
            traffic=traffic,
            **lengths,
        )
        if base_url is not None:
            return await load_foreign(base_url, _targets(target, api_key), shape, parse_objectives(goodput))
        own = {"dtype": dtype, **_settings(setting)}
        return await load_own(_located(model), own, shape, parse_objectives(goodput), say)

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
    kernels: Annotated[bool, typer.Option("--kernels", help="The kernels alone, without a model.")] = False,
    shape: Annotated[str, typer.Option(help="With --kernels: widths of this model.")] = "qwen3-4b",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """The cost of adapters in a decode step, without HTTP: mixed rows beside base rows."""
    with exit_codes():
        pairs = [_rows(text) for text in rows or ("16/8", "1/1", "16/16")]
    if kernels:
        measure_lora_kernels(pairs, rank, device, dtype, shape, out, as_json)
        return

    async def work() -> Report:
        from loraplex.platform.bench.lora import LoraJob, LoraShape, measure_as_engine

        shapes = [LoraShape(count, adapters, rank, input_len, steps) for count, adapters in pairs]
        return measure_as_engine(LoraJob(_located(model), dtype, device, shapes))

    run_bench(work, out, as_json)


@app.command()
def quantization(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    scheme: Annotated[list[str] | None, typer.Option(help="int8, int4 or fp8; repeatable.")] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Of a decode step; repeatable.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Counted steps of each model.")] = 64,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """What fewer bits bring: decode steps and prompts of a quantized base beside the unquantized one."""

    async def work() -> Report:
        from tests.benchmarks.quantized_process import QuantizationJob, measure_as_engine

        job = QuantizationJob(
            _located(model), dtype, device, scheme or ["int8", "int4"], rows or [1, 16], steps
        )
        return measure_as_engine(job)

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
    samples: Annotated[int, typer.Option(min=0, help="Answers repeated alone.")] = 20,
    setting: Setting = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Many registered adapters over a small residency budget, against traffic on resident ones."""
    shape = ManyShape(
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
    run_bench(lambda: measure_many(_located(model), shape, _settings(setting), say), out, as_json)


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
    shape = PrefixShape(prefix_len=prefix_len, prefixes=prefixes, dtype=dtype)
    run_bench(lambda: measure_prefix_cache(_located(model), shape, _settings(setting)), out, as_json)


@app.command()
def grammar(
    part: Annotated[
        list[str] | None, typer.Option("--part", help=f"{', '.join(GRAMMAR_PARTS)}; repeatable, default all.")
    ] = None,
    model: Model = None,
    dtype: Dtype = "bfloat16",
    rows: Annotated[int, typer.Option(min=1, help="Rows with grammars, and without.")] = 16,
    output_len: Annotated[int, typer.Option(min=32, help="Most tokens of a row.")] = 128,
    mask_rows: Annotated[int, typer.Option(min=1, help="Matchers whose masks are filled per step.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Counted steps of masks.")] = 200,
    vocabulary: Annotated[int, typer.Option(min=512, help="Tokens of the larger vocabulary.")] = 131_072,
    neighbours: Annotated[int, typer.Option(min=1, help="Plain rows beside hostile grammars.")] = 8,
    repeats: Repeats = 3,
    setting: Setting = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """The cost of grammars: output rate, masks, and what hostile ones do to others."""
    from tests.benchmarks.grammar_masks import MaskShape
    from tests.benchmarks.grammar_process import MaskJob, measure_masks_as_engine

    rate = RateShape(rows=rows, max_tokens=output_len, repeats=repeats, dtype=dtype)
    masks = MaskShape(rows=mask_rows, steps=steps, large=vocabulary)
    beside = NeighbourShape(rows=neighbours, output_len=output_len * 2, repeats=repeats, dtype=dtype)

    async def work(name: str) -> Report:
        if name == "masks":
            return measure_masks_as_engine(MaskJob(_located(model), masks))
        if name == "rate":
            return await measure_rate(_located(model), rate, _settings(setting), say)
        return await measure_neighbours(_located(model), beside, _settings(setting), say)

    with exit_codes():
        parts = _parts(part)
    for name in parts:
        run_bench(partial(work, name), out, as_json)


@app.command()
def prefill(
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
    """What a long prompt does to streaming rows, with chunked prefill and without."""
    shape = LongPromptShape(rows=rows, long_len=long_len, output_len=output_len, repeats=repeats, dtype=dtype)
    run_bench(lambda: measure_long_prompt(_located(model), shape, _settings(setting), say), out, as_json)


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
    """What limits and books add to a request, with a real PostgreSQL and Valkey, beside requests without them."""
    shape = AdmissionShape(
        rate=rate, seconds=seconds, rounds=rounds, input_len=input_len, output_len=output_len
    )
    run_bench(lambda: measure_admission(shape, say), out, as_json, uvloop.new_event_loop)


def _located(model: str | None) -> str:
    """A folder or file on this disk. Raises `ModelError` or `StartError`."""
    return str(ensure_demo_model(load_settings().data_dir) if model is None else locate_model(model))


def _settings(pairs: list[str] | None) -> dict[str, str]:
    found = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise SettingsError(f"--setting {pair!r}: allowed is NAME=VALUE")
        found[name.lower()] = value
    return found


def _targets(names: list[str] | None, api_key: str | None) -> list[Target]:
    if api_key is None or not names:
        raise SettingsError("--base-url needs --api-key and at least one --target MODEL")
    return [Target(name, api_key) for name in names]


def _parts(names: list[str] | None) -> list[str]:
    for name in names or ():
        if name not in GRAMMAR_PARTS:
            raise SettingsError(f"--part {name!r}: allowed is {', '.join(GRAMMAR_PARTS)}")
    return list(names or GRAMMAR_PARTS)


def _distribution(name: str) -> Distribution:
    if name not in get_args(Distribution):
        raise SettingsError(f"--distribution {name!r}: allowed is {', '.join(get_args(Distribution))}")
    return cast(Distribution, name)


def _rows(text: str) -> tuple[int, int]:
    rows, _, adapters = text.partition("/")
    if not (rows.isdecimal() and adapters.isdecimal() and 1 <= int(adapters) <= int(rows)):
        raise SettingsError(f"--rows {text!r}: allowed is ROWS/ADAPTERS with at least one row per adapter")
    return int(rows), int(adapters)
