"""The commands of steps and of the engine: a decoder without a server."""

from typing import Annotated

import typer
from tests.benchmarks.commands.kernels import Device
from tests.benchmarks.kernels.shapes import LAYER_SHAPES

from loraplex.platform.bench.report import Report
from loraplex.platform.cli.bench import AsJson, Dtype, Model, Out, Repeats, resolve_model, run_bench
from loraplex.platform.processes.progress import Progress


def quantization(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
    scheme: Annotated[list[str] | None, typer.Option(help="int8, int4 or fp8; repeatable.")] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Of a decode step; repeatable.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Counted steps of each model.")] = 64,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Decode steps and prompts of a quantized base model against the unquantized one."""

    async def work(progress: Progress) -> Report:
        from tests.benchmarks.quantization import QuantizationJob, measure_in_subprocess

        schemes = scheme or ["int8", "int4"]
        job = QuantizationJob(resolve_model(model, progress), dtype, device, schemes, rows or [1, 16], steps)
        return measure_in_subprocess(job)

    run_bench(work, out, as_json)


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

    async def work(progress: Progress) -> Report:
        from tests.benchmarks.decode import DecodeJob, measure_in_subprocess

        formats = quantization or ["none", "int8"]
        job = DecodeJob(resolve_model(model, progress), dtype, formats, rows or [1, 16], steps, repeats)
        return measure_in_subprocess(job)

    run_bench(work, out, as_json)


def thought_step(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    rows: Annotated[int, typer.Option(min=2, help="Of a decode step; half of them think.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Counted steps of each side.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="Of each walk through a mask.")] = 2_000,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Decode steps while half of the rows think, and CPU time of thought's masks per token."""

    async def work(progress: Progress) -> Report:
        from tests.benchmarks.thought_step import ThoughtJob, measure_in_subprocess

        return measure_in_subprocess(ThoughtJob(resolve_model(model, progress), dtype, rows, steps, tokens))

    run_bench(work, out, as_json)


def grammar_masks(
    model: Model = None,
    mask_rows: Annotated[int, typer.Option(min=1, help="Matchers whose masks are filled per step.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Counted steps.")] = 200,
    vocabulary: Annotated[int, typer.Option(min=512, help="Tokens of the larger vocabulary.")] = 131_072,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Compile, fill, advance and apply grammar masks, per backend and vocabulary size."""

    async def work(progress: Progress) -> Report:
        from tests.benchmarks.grammar_masks import MaskJob, MaskShape, measure_in_subprocess

        shape = MaskShape(rows=mask_rows, steps=steps, large=vocabulary)
        return measure_in_subprocess(MaskJob(resolve_model(model, progress), shape))

    run_bench(work, out, as_json)


def steps(
    shape: Annotated[str, typer.Option(help=f"Widths of {', '.join(LAYER_SHAPES)}.")] = "llama-3-8b",
    step_rows: Annotated[int, typer.Option("--rows", min=8, help="Decoding rows.")] = 64,
    tokens: Annotated[int, typer.Option(min=128, max=2048, help="Tokens of a mixed step.")] = 1024,
    repeats: Repeats = 20,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Launches and host time of a GPU's steps, launched kernel by kernel and replayed; needs no GPU."""

    async def work(progress: Progress) -> Report:
        from tests.benchmarks.steps import StepsShape, measure_steps

        return measure_steps(StepsShape(shape, step_rows, tokens, repeats))

    if shape not in LAYER_SHAPES:
        raise typer.BadParameter(f"must be one of {', '.join(LAYER_SHAPES)}", param_hint="--shape")
    run_bench(work, out, as_json)
