"""Adapters' part added by what reads a projection: shrink, and a reader that expands as it reads. For few adapters."""

from collections.abc import Callable

import torch
from tests.benchmarks.kernels.elementwise import BLOCK, EPSILON, POSITIONS
from tests.benchmarks.kernels.lora import SiteCall, host_groups
from tests.benchmarks.kernels.problem import DTYPES, Operands, Problem, TensorSource, size_of, widened
from tests.benchmarks.kernels.shapes import LayerShape
from torch import Tensor

from loraplex.engine.kernels.group_rows import group_rows
from loraplex.engine.kernels.reference import rms_norm as reference_norm
from loraplex.engine.kernels.reference import rotary as reference_rotary
from loraplex.engine.kernels.reference import silu_mul as reference_silu
from loraplex.engine.kernels.rms_norm import rms_norm
from loraplex.engine.kernels.rotary import rotary_write_kv
from loraplex.engine.kernels.sgmv import shrink
from loraplex.engine.kernels.silu_mul import silu_mul
from loraplex.engine.lora.device_batch import DeviceLoraBatch, LoraPath, PendingDelta

READERS = {"rotary": "qkv", "norm": "o", "silu": "gate_up"}
"""What reads, and the projection."""

Outputs = tuple[Tensor, ...]
Reader = Callable[[Tensor, PendingDelta | None], Outputs]


def folded_problem(
    reader: str, model: LayerShape, rows: int, adapters: int, rank: int, dtype: str, pages: str
) -> Problem:
    """`reader` of `READERS` on a projection's output and what its adapters add. Raises `ValueError` for many adapters."""
    inputs, sizes = model.sites()[READERS[reader]]

    def make(tensors: TensorSource) -> Operands:
        row_slots = [row % adapters for row in range(rows)]
        batch = group_rows(row_slots, tensors.device)
        if not isinstance(batch, DeviceLoraBatch) or batch.path is not LoraPath.FOLDED:
            raise ValueError("this step's adapters are not added by what reads a projection")
        call = SiteCall(tensors, (inputs, sizes), adapters, rank, DTYPES[dtype], DTYPES[pages], rows)
        read, read_wide = _readers(reader, tensors, model, rows, DTYPES[dtype])

        def run() -> Outputs:
            return read(call.y, PendingDelta(shrink(call.x, call.site, batch), call.site, batch))

        def expected() -> Outputs:
            # The sum is rounded to the rows' type, as it is where it is stored.
            whole = call.expected(host_groups(row_slots, tensors.device))
            return read_wide(whole.to(call.y.dtype).float(), None)

        return Operands(run, expected)

    weights = adapters * rank * (inputs * len(sizes) + sum(sizes))
    return Problem(
        op=f"lora into {reader}",
        variant=f"{pages} pages" if pages != dtype else "pages",
        shape={"rows": rows, "adapters": adapters, "rank": rank, "inputs": inputs, "outputs": sum(sizes)},
        dtype=dtype,
        bytes=weights * size_of(pages) + rows * (inputs + 2 * sum(sizes)) * size_of(dtype),
        flops=2 * rows * rank * (inputs * len(sizes) + sum(sizes)),
        make=make,
    )


def _readers(
    reader: str, tensors: TensorSource, model: LayerShape, rows: int, dtype: torch.dtype
) -> tuple[Reader, Reader]:
    """The kernel, and the same in float32 without adapters."""
    if reader == "silu":
        return (
            lambda y, delta: (silu_mul(y, delta),),
            lambda y, _: (reference_silu.silu_mul(y),),
        )
    if reader == "norm":
        residual = tensors.normal(rows, model.hidden, dtype=dtype)
        weight = tensors.normal(model.hidden, dtype=dtype)

        def normed(y: Tensor, _: PendingDelta | None) -> Outputs:
            wide = (residual.float() + y).to(dtype).float()
            return reference_norm.rms_norm(wide, None, weight.float(), EPSILON), wide

        return lambda y, delta: (rms_norm(y, residual, weight, EPSILON, delta), residual), normed
    return _rotary_readers(tensors, model, rows, dtype)


def _rotary_readers(
    tensors: TensorSource, model: LayerShape, rows: int, dtype: torch.dtype
) -> tuple[Reader, Reader]:
    blocks = rows // BLOCK + 2
    cache = tensors.normal(blocks, BLOCK, 2, model.kv_heads, model.head_dim, dtype=dtype)
    positions = tensors.integers(0, POSITIONS, rows, dtype=torch.int64)
    slots = tensors.permutation(blocks * BLOCK, torch.int64)[:rows]
    angles = (POSITIONS, model.head_dim // 2)
    rope = (tensors.normal(*angles, dtype=torch.float32), tensors.normal(*angles, dtype=torch.float32))
    rotated = model.q_size + model.kv_size

    def read(y: Tensor, delta: PendingDelta | None) -> Outputs:
        rotary_write_kv(y, cache, positions, slots, rope, None, EPSILON, delta=delta)
        return y[:, :rotated], cache

    def read_wide(y: Tensor, _: PendingDelta | None) -> Outputs:
        kept = widened(cache)
        reference_rotary.rotary_write_kv(y, kept, positions, slots, rope, None, EPSILON)
        return y[:, :rotated], kept

    return read, read_wide
