"""Every launch of a Triton kernel that the engine may make, as calls of the operations: which kernels run is found by recording.

Invariant: a kernel's tiles, dtypes and flags are all here; a new one is added with the kernel.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.benchmarks.kernels.attention import decode_problem, prefill_problem
from tests.benchmarks.kernels.elementwise import (
    bitmask_problem,
    cutoff_problem,
    norm_problem,
    rotary_problem,
    silu_problem,
)
from tests.benchmarks.kernels.gemm import GROUP, gemm_problem, round_rows_problem
from tests.benchmarks.kernels.lora import embedding_problem, layer_problem, pair_problem
from tests.benchmarks.kernels.lora_folded import READERS, folded_problem
from tests.benchmarks.kernels.problem import Problem
from tests.benchmarks.kernels.shapes import LLAMA_3_8B, LayerShape

from loraplex.engine.quantization.groups import GROUP_SIZES

FORMATS = (
    ("int8", GROUP),
    *((name, group) for name in ("int8 groups", "int4", "int4 zeros") for group in GROUP_SIZES),
)


@dataclass(frozen=True, slots=True)
class Variant:
    """One call. `aligned` False: rows of odd length, whose loads cannot be wide. `is_rare`: too much for each change."""

    problem: Problem
    aligned: bool = True
    is_rare: bool = False


def variants(*, with_rare: bool = False) -> list[Variant]:
    """In an order that spreads the slow ones."""
    found = [*_gemms(), *_attentions(), *_loras(), *_elementwise()]
    return [variant for variant in found if with_rare or not variant.is_rare]


def _gemms() -> Iterator[Variant]:
    """Every format by every tile; splits come with few outputs, biases and other dtypes by one tile of each kernel."""
    for name, group in FORMATS:
        yield Variant(gemm_problem(name, 16, 6144, 4096, "bfloat16", group))
        for rows, outputs in ((16, 28672), (32, 6144), (64, 28672), (256, 28672)):
            problem = gemm_problem(name, rows, outputs, 4096, "bfloat16", group)
            yield Variant(problem, is_rare=group != GROUP or name == "int8 groups")
    for rows in (1, 16):
        yield Variant(gemm_problem("int4", rows, 4096, 4096, "bfloat16"))
    for name in ("int8", "int4", "int4 zeros"):
        yield Variant(gemm_problem(name, 64, 4096, 4096, "bfloat16"))
        yield Variant(gemm_problem(name, 16, 2560, 9728, "bfloat16"))
        # Zeros add the same lines to int4 in every dtype, and compile longest in float32.
        yield Variant(gemm_problem(name, 4, 4096, 4096, "float32"), is_rare=name == "int4 zeros")
        for rows in (16, 256):
            is_rare = rows == 256 or name == "int4"
            yield Variant(gemm_problem(name, rows, 6144, 4096, "bfloat16", has_bias=True), is_rare=is_rare)
            yield Variant(gemm_problem(name, rows, 6144, 4096, "float16"), is_rare=is_rare)


def _heads(size: int, group: int) -> LayerShape:
    return replace(LLAMA_3_8B, heads=8 * group, head_dim=size)


def _attentions() -> Iterator[Variant]:
    for size, group in ((64, 3), (128, 4), (256, 2), (512, 8)):
        window = 4096 if size == 64 else None
        yield Variant(decode_problem(_heads(size, group), 64, 8192, "bfloat16", "bfloat16", window))
        yield Variant(prefill_problem(_heads(size, group), 512, 8192, "bfloat16", "bfloat16", window))
    yield Variant(decode_problem(_heads(128, 4), 1, 300, "bfloat16", "bfloat16"))
    yield Variant(decode_problem(_heads(128, 4), 64, 8192, "bfloat16", "fp8"))
    yield Variant(decode_problem(_heads(64, 8), 64, 8192, "bfloat16", "fp8"))
    yield Variant(prefill_problem(_heads(128, 4), 512, 8192, "bfloat16", "fp8"))
    yield Variant(decode_problem(_heads(128, 4), 64, 8192, "float32", "float32"))
    yield Variant(prefill_problem(_heads(128, 4), 512, 8192, "float16", "float16"))


def _loras() -> Iterator[Variant]:
    yield Variant(pair_problem(64, 64, 16, 4096, 4096, "bfloat16", "bfloat16"))
    yield Variant(pair_problem(3, 2, 5, 1001, 999, "bfloat16", "bfloat16"), aligned=False)
    yield Variant(pair_problem(64, 64, 16, 4096, 4096, "float32", "float32"))
    for pages in ("bfloat16", "int8", "fp8"):
        for rows, adapters, decodes in ((64, 64, 64), (16, 1, 16), (512, 2, 64)):
            yield Variant(layer_problem(LLAMA_3_8B, rows, adapters, 16, "bfloat16", pages, decodes=decodes))
    yield Variant(pair_problem(9, 9, 5, 1001, 999, "bfloat16", "int8"), aligned=False)
    for reader in READERS:
        yield Variant(folded_problem(reader, LLAMA_3_8B, 16, 1, 16, "bfloat16", "bfloat16"))
    yield Variant(folded_problem("silu", LLAMA_3_8B, 16, 1, 16, "bfloat16", "int8"))
    yield Variant(embedding_problem(LLAMA_3_8B, 64, 64, 16, "bfloat16", "bfloat16"))
    yield Variant(embedding_problem(LLAMA_3_8B, 64, 64, 16, "bfloat16", "int8"))
    yield Variant(cutoff_problem(LLAMA_3_8B, 64))


def _elementwise() -> Iterator[Variant]:
    for dtype in ("bfloat16", "float16", "float32"):
        yield Variant(bitmask_problem(LLAMA_3_8B, 64, dtype))
    for dtype in ("bfloat16", "float32"):
        yield Variant(norm_problem(LLAMA_3_8B, 64, dtype))
        yield Variant(rotary_problem(LLAMA_3_8B, 64, dtype, dtype, qk_norm=dtype == "bfloat16"))
        yield Variant(silu_problem(LLAMA_3_8B, 64, dtype))
    yield Variant(rotary_problem(LLAMA_3_8B, 64, "bfloat16", "fp8", qk_norm=False))
    yield Variant(round_rows_problem(64, 4096, "bfloat16"))
