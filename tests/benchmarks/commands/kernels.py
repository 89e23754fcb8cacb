"""The commands `attention`, `gemm` and `lora-kernels`: single kernels with the layer widths of published models."""

from collections.abc import Sequence
from typing import Annotated

import typer
from tests.benchmarks.kernels.shapes import LAYER_SHAPES

from loraplex.platform.bench.report import Report
from loraplex.platform.cli.bench import AsJson, Out, Rank, parse_rows, run_bench
from loraplex.platform.cli.command_context import exit_codes
from loraplex.platform.processes.progress import Progress
from loraplex.platform.startup_errors import SettingsError

DTYPES = ("bfloat16", "float16", "float32")
KV_DTYPES = (*DTYPES, "fp8")
VARIANTS = ("int8", "int4", "fp8", "dense", "torch mm", "torch fp8", "torch int4")

Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help=f"Of rows: {', '.join(DTYPES)}.")]
Shape = Annotated[str, typer.Option(help=f"Widths of {', '.join(LAYER_SHAPES)}.")]


def attention(
    device: Device = "auto",
    dtype: Dtype = "bfloat16",
    kv_dtype: Annotated[str | None, typer.Option(help=f"{', '.join(KV_DTYPES)}; default as rows.")] = None,
    shape: Shape = "qwen3-4b",
    rows: Annotated[
        list[int] | None, typer.Option("--rows", min=1, help="Decoding rows; repeatable.")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option("--context", min=1, help="Tokens of each; repeatable.")
    ] = None,
    chunk: Annotated[int, typer.Option(min=0, help="Also a prefill chunk of so many tokens.")] = 256,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Paged attention: decodes and a prefill chunk, as a share of the memcpy bandwidth."""

    async def work(progress: Progress) -> Report:
        from tests.benchmarks.process import AttentionShape, KernelJob, measure_in_subprocess

        sizes = AttentionShape(kv_dtype or dtype, rows or [1, 16], context or [512, 2048], chunk)
        return measure_in_subprocess(KernelJob("attention", device, dtype, shape, attention=sizes))

    _check(dtype, DTYPES, "--dtype")
    _check(kv_dtype or dtype, KV_DTYPES, "--kv-dtype")
    _check(shape, tuple(LAYER_SHAPES), "--shape")
    run_bench(work, out, as_json)


def gemm(
    device: Device = "auto",
    dtype: Dtype = "bfloat16",
    shape: Shape = "qwen3-4b",
    rows: Annotated[list[int] | None, typer.Option("--rows", min=1, help="Rows of x; repeatable.")] = None,
    variant: Annotated[
        list[str] | None, typer.Option("--variant", help=f"{', '.join(VARIANTS)}; repeatable.")
    ] = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """The four base products of a layer in 8 and 4 bits, next to 16."""

    async def work(progress: Progress) -> Report:
        from tests.benchmarks.process import GemmShape, KernelJob, measure_in_subprocess

        sizes = GemmShape(variant or ["int8", "int4", "dense"], rows or [1, 16, 64])
        return measure_in_subprocess(KernelJob("gemm", device, dtype, shape, gemm=sizes))

    for name in variant or ():
        _check(name, VARIANTS, "--variant")
    _check(dtype, DTYPES, "--dtype")
    _check(shape, tuple(LAYER_SHAPES), "--shape")
    run_bench(work, out, as_json)


def lora_kernels(
    device: Device = "auto",
    dtype: Dtype = "bfloat16",
    shape: Shape = "qwen3-4b",
    rank: Rank = 16,
    rows: Annotated[list[str] | None, typer.Option("--rows", help="ROWS/ADAPTERS; repeatable.")] = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Grouped LoRA kernels at one site of a layer, and at all of its sites together."""

    async def work(progress: Progress) -> Report:
        from tests.benchmarks.process import KernelJob, LoraSizes, measure_in_subprocess

        return measure_in_subprocess(KernelJob("lora", device, dtype, shape, lora=LoraSizes(pairs, rank)))

    with exit_codes():
        pairs = [parse_rows(text) for text in rows or ("16/8", "1/1", "16/16")]
    _check(dtype, DTYPES, "--dtype")
    _check(shape, tuple(LAYER_SHAPES), "--shape")
    run_bench(work, out, as_json)


def _check(value: str, allowed: Sequence[str], option: str) -> None:
    with exit_codes():
        if value not in allowed:
            raise SettingsError(f"{option} {value!r}: allowed is {', '.join(allowed)}")
