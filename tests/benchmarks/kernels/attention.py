"""Paged attention: the decodes of a step, and one prefill chunk."""

from collections.abc import Sequence

import torch
from tests.benchmarks.kernels.problem import DTYPES, Operands, Problem, TensorSource, size_of, widened
from tests.benchmarks.kernels.shapes import LayerShape
from torch import Tensor

from loraplex.engine.kernels.paged_attention import decode_attention, prefill_attention
from loraplex.engine.kernels.prefill_chunks import PrefillChunks, tiles_of
from loraplex.engine.kernels.reference import paged_attention as reference

BLOCK = 16
"""Tokens of a cache block."""


def decode_problem(
    model: LayerShape, rows: int, context: int, dtype: str, kv_dtype: str, window: int | None = None
) -> Problem:
    """One query in each of `rows` sequences of `context` tokens, whose blocks lie anywhere in the cache."""
    kv = rows * min(context, window or context) * 2 * model.kv_size
    qkv_columns = model.q_size + 2 * model.kv_size

    def make(tensors: TensorSource) -> Operands:
        blocks = -(-context // BLOCK)
        cache = _cache(tensors, model, rows * blocks, kv_dtype)
        tables = tensors.permutation(rows * blocks, torch.int32).view(rows, blocks)
        lengths = tensors.integers(context, context + 1, rows, dtype=torch.int32)
        qkv = tensors.normal(rows, qkv_columns, dtype=DTYPES[dtype])
        out = torch.empty_like(qkv[:, : model.q_size].contiguous())
        scale = model.head_dim**-0.5

        def run() -> tuple[Tensor, ...]:
            decode_attention(qkv, out, cache, tables, lengths, scale, window)
            return (out,)

        def expected() -> tuple[Tensor, ...]:
            wide = widened(out)
            reference.decode_attention(qkv.float(), wide, cache.float(), tables, lengths, scale, window)
            return (wide,)

        return Operands(run, expected, poisoned=(out,))

    return Problem(
        op="attention decode",
        variant=_variant(kv_dtype, window),
        shape={
            "rows": rows,
            "context": context,
            "heads": model.heads,
            "kv": model.kv_heads,
            "d": model.head_dim,
        },
        dtype=dtype,
        bytes=kv * size_of(kv_dtype) + 2 * rows * model.q_size * size_of(dtype),
        flops=4 * rows * min(context, window or context) * model.q_size,
        make=make,
    )


def sdpa_problem(model: LayerShape, rows: int, context: int, dtype: str) -> Problem:
    """torch's own attention on the same sequences, each contiguous in memory: the speed mark of decodes."""

    def make(tensors: TensorSource) -> Operands:
        keys = (rows, model.kv_heads, context, model.head_dim)
        query = tensors.normal(rows, model.heads, 1, model.head_dim, dtype=DTYPES[dtype])
        key, value = (tensors.normal(*keys, dtype=DTYPES[dtype]) for _ in range(2))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            return (torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),)

        return Operands(
            lambda: attend(query, key, value), lambda: attend(query.float(), key.float(), value.float())
        )

    return Problem(
        op="attention decode",
        variant="torch sdpa",
        shape={
            "rows": rows,
            "context": context,
            "heads": model.heads,
            "kv": model.kv_heads,
            "d": model.head_dim,
        },
        dtype=dtype,
        bytes=2 * rows * (context * model.kv_size + model.q_size) * size_of(dtype),
        flops=4 * rows * context * model.q_size,
        make=make,
        is_peer=True,
    )


def prefill_problem(
    model: LayerShape, chunk: int, length: int, dtype: str, kv_dtype: str, window: int | None = None
) -> Problem:
    """The last `chunk` of `length` tokens of one sequence."""
    return prefills_problem(model, [(chunk, length)], dtype, kv_dtype, window)


def prefills_problem(
    model: LayerShape, chunks: Sequence[tuple[int, int]], dtype: str, kv_dtype: str, window: int | None = None
) -> Problem:
    """A step's prefill chunks in one launch: of each sequence (rows, tokens with them)."""
    rows = sum(chunk for chunk, _ in chunks)
    longest = max(length for _, length in chunks)

    def make(tensors: TensorSource) -> Operands:
        columns = -(-longest // BLOCK)
        cache = _cache(tensors, model, len(chunks) * columns, kv_dtype)
        tables = tensors.permutation(len(chunks) * columns, torch.int32).view(len(chunks), columns)
        step = _step_of(chunks, tables)
        qkv = tensors.normal(rows, model.q_size + 2 * model.kv_size, dtype=DTYPES[dtype])
        out = torch.empty_like(qkv[:, : model.q_size].contiguous())
        scale = model.head_dim**-0.5

        def run() -> tuple[Tensor, ...]:
            prefill_attention(qkv, out, cache, step, scale, window)
            return (out,)

        def expected() -> tuple[Tensor, ...]:
            wide = widened(out)
            reference.prefill_attention(qkv.float(), wide, cache.float(), step, scale, window)
            return (wide,)

        return Operands(run, expected, poisoned=(out,))

    seen = sum(chunk * (length - chunk) + chunk * (chunk + 1) // 2 for chunk, length in chunks)
    tokens = sum(length for _, length in chunks)
    return Problem(
        op="attention prefill",
        variant=_variant(kv_dtype, window) + (f", {len(chunks)} chunks" if len(chunks) > 1 else ""),
        shape={
            "chunk": rows,
            "length": tokens,
            "heads": model.heads,
            "kv": model.kv_heads,
            "d": model.head_dim,
        },
        dtype=dtype,
        bytes=tokens * 2 * model.kv_size * size_of(kv_dtype) + 2 * rows * model.q_size * size_of(dtype),
        flops=4 * seen * model.q_size,
        make=make,
    )


def _step_of(chunks: Sequence[tuple[int, int]], tables: Tensor) -> PrefillChunks:
    ends = [sum(rows for rows, _ in chunks[: index + 1]) for index in range(len(chunks))]
    begins = [0, *ends[:-1]]
    tile_chunks, tile_begins = tiles_of(begins, ends)

    def like_tables(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=tables.device).as_subclass(type(tables))

    return PrefillChunks(
        begins=like_tables(begins),
        ends=like_tables(ends),
        lengths=like_tables([length for _, length in chunks]),
        tables=tables,
        tile_chunks=like_tables(tile_chunks),
        tile_begins=like_tables(tile_begins),
    )


def _variant(kv_dtype: str, window: int | None) -> str:
    return f"kv {kv_dtype}" + (f", window {window}" if window else "")


def _cache(tensors: TensorSource, model: LayerShape, blocks: int, kv_dtype: str) -> Tensor:
    shape = (blocks, BLOCK, 2, model.kv_heads, model.head_dim)
    return tensors.normal(*shape, dtype=DTYPES[kv_dtype])
