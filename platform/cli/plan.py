"""`loraplex plan`: the memory worksheet of a model, before anything is loaded. Exit codes: 0 it fits, 1 it does not, 2 wrong usage."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from loraplex.engine.capacity.memory_advice import Advice, memory_advice
from loraplex.engine.capacity.memory_plan import Machine, MemoryPlan, Workload, plan_memory
from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import EngineError
from loraplex.engine.lora.page_geometry import MAX_RANK
from loraplex.engine.models.config import ModelConfig
from loraplex.platform.cli.command_context import exit_codes
from loraplex.platform.cli.plan_adapters import AdapterDemand, adapter_tiers
from loraplex.platform.cli.plan_cost import cost_document, cost_lines, measured
from loraplex.platform.config import Settings, load_settings
from loraplex.platform.engines.engine_config import engine_config
from loraplex.platform.engines.memory_worksheet import worksheet_document, worksheet_table
from loraplex.platform.server.base_model_file import read_base_model
from loraplex.platform.startup_errors import SettingsError

UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([a-zA-Z]*)")


def plan_command(
    model: Annotated[
        str | None, typer.Option(help="A folder, a .gguf file or a hub id; by default the served one.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    quantization: Annotated[str | None, typer.Option(help="none, int8, int4 or fp8.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(help="Plan for a GPU with this much memory, such as 141GB, instead of this machine."),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt and response together, in tokens.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens per row for the number of rows; by default the longest.")
    ] = None,
    rank: Annotated[int, typer.Option(min=1, max=MAX_RANK, help="Rank of the adapters to count.")] = 16,
    adapters: Annotated[
        int | None,
        typer.Option(min=1, max=10**7, help="Registered adapters: adds their tiers and hit rates."),
    ] = None,
    engines: Annotated[int, typer.Option(min=1, max=1024, help="Engines that serve them.")] = 1,
    adapters_in_use: Annotated[
        int | None, typer.Option(min=1, help="Adapters that are asked for; by default all.")
    ] = None,
    zipf: Annotated[
        float, typer.Option(min=0, max=4, help="Popularity: the adapter of rank i is asked for as i^-ZIPF.")
    ] = 1.0,
    requests_per_second: Annotated[
        float | None, typer.Option(min=0, help="Of all adapters: adds loads and reads per second.")
    ] = None,
    price_per_hour: Annotated[
        str | None,
        typer.Option(help="What the machine costs per hour, such as 2.49: adds the cost of tokens."),
    ] = None,
    currency: Annotated[str, typer.Option(help="Currency of that price.")] = "USD",
    bench_result: Annotated[
        Path | None, typer.Option(help="The throughput, as a result file of `loraplex bench serve`.")
    ] = None,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(help="The throughput, measured elsewhere: of prompts and responses together."),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="The server's data directory.")] = None,
    config: Annotated[Path | None, typer.Option(help="Default ./loraplex.toml, if it exists.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Work out what a model, its adapters and its KV cache take in memory, and how many rows that serves."""
    flags = {
        "model": model,
        "dtype": dtype,
        "quantization": quantization,
        "device": device,
        "max_model_len": max_model_len,
        "data_dir": data_dir,
    }
    with exit_codes():
        settings = load_settings(flags, config)
        engine, described = _model(settings)
        plan = _plan(described, engine, _machine(engine, described, device_memory), Workload(context, rank))
        demand = AdapterDemand(adapters or 0, engines, adapters_in_use, zipf, requests_per_second)
        tiers = adapter_tiers(plan, engine.lora.host_max_bytes // engines, demand) if adapters else None
        cost = _cost(price_per_hour, currency, tokens_per_second, bench_result)
    advice = memory_advice(described, engine, plan)
    if as_json:
        parts = {"adapter_tiers": tiers and asdict(tiers), "cost": cost}
        given = {name: part for name, part in parts.items() if part is not None}
        typer.echo(json.dumps(worksheet_document(plan, advice) | given))
    else:
        _print(plan, advice, [*(tiers.lines() if tiers else ()), *(cost_lines(cost) if cost else ())])
    raise typer.Exit(0 if plan.fits else 1)


def _cost(
    price_per_hour: str | None, currency: str, tokens_per_second: float | None, bench_result: Path | None
) -> dict[str, Any] | None:
    """The cost of tokens; None without a price."""
    if price_per_hour is not None:
        return cost_document(price_per_hour, currency, measured(tokens_per_second, bench_result))
    if tokens_per_second is not None or bench_result is not None:
        raise SettingsError("--price-per-hour: none given, so a throughput has no cost")
    return None


def _model(settings: Settings) -> tuple[EngineConfig, ModelConfig]:
    path = settings.model or read_base_model(settings.data_dir).path
    engine = engine_config(settings, path)
    try:
        return engine, load_model_config(path)
    except EngineError as error:
        raise SettingsError(f"setting `model`: {error}") from None


def _plan(model: ModelConfig, engine: EngineConfig, machine: Machine, workload: Workload) -> MemoryPlan:
    try:
        return plan_memory(model, engine, machine, workload)
    except EngineError as error:
        raise SettingsError(str(error)) from None


def _machine(engine: EngineConfig, model: ModelConfig, device_memory: str | None) -> Machine:
    """The requested machine, or this one. Nothing is loaded, so all of its memory counts."""
    import torch

    from loraplex.engine.device import choose_device, choose_dtype
    from loraplex.engine.model_loading import checkpoint_dtype

    try:
        device = torch.device("cuda") if device_memory else choose_device(engine.device)
        dtype = str(choose_dtype(engine.dtype, checkpoint_dtype(model), device)).removeprefix("torch.")
    except EngineError as error:
        raise SettingsError(str(error)) from None
    if device_memory is not None:
        return Machine(is_cuda=True, dtype=dtype, memory=parse_size(device_memory))
    if device.type == "cuda":
        return Machine(is_cuda=True, dtype=dtype, memory=torch.cuda.mem_get_info(device)[1])
    return Machine(is_cuda=False, dtype=dtype)


def parse_size(text: str) -> int:
    """Bytes of `141GB` (decimal), `80 GiB` (binary) or a plain number. Raises `SettingsError`."""
    match = _SIZE.fullmatch(text.strip())
    unit = UNITS.get(match[2].lower()) if match else None
    size = 0 if match is None or unit is None else int(float(match[1]) * unit)
    if not 1 << 20 <= size <= 1 << 50:
        raise SettingsError(
            f"--device-memory: {text!r}; allowed is a size such as 141GB or 80GiB, at least 1 MiB"
        )
    return size


def _print(plan: MemoryPlan, advice: list[Advice], lines: list[str]) -> None:
    console = Console(soft_wrap=True)
    console.print(worksheet_table(plan))
    if not plan.fits:
        console.print("\nIt does not fit. What would change that:", style="red")
    for each in advice:
        console.print(f"- {each.text}", markup=False, highlight=False)
    for line in lines:
        typer.echo(line)
