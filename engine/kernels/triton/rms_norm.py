"""RMSNorm (Zhang & Sennrich 2019) with the residual added before it, in Triton: one program per row."""

import torch
import triton
import triton.language as tl

WARP_COLUMNS = 512
"""Columns per warp: two loads of 16 bytes a thread, so that a row of 4096 has all its bytes on the way at once."""
MAX_WARPS = 16


@triton.jit
def inverse_rms(square_sum, size, epsilon):  # type: ignore[no-untyped-def]
    """One over the root mean square of `size` values, given the sum of their squares in fp32."""
    return tl.rsqrt(square_sum / size + epsilon)


@triton.jit
def normalized(values, weight, size, epsilon):  # type: ignore[no-untyped-def]
    """The norm of one row in fp32. `values` are fp32 and 0 behind the row's `size` columns."""
    return values * inverse_rms(tl.sum(values * values, 0), size, epsilon) * weight.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, size]
    residual,  # [rows, size], written; only with `has_residual`
    weight,
    out,
    size,
    epsilon,
    has_residual: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Row `program_id(0)`, whole."""
    columns = tl.arange(0, block)
    within = columns < size
    place = tl.program_id(0).to(tl.int64) * size + columns
    values = tl.load(x + place, mask=within, other=0.0).to(tl.float32)
    scales = tl.load(weight + columns, mask=within, other=0.0)
    if has_residual:
        values += tl.load(residual + place, mask=within, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + place, rounded, mask=within)
        values = rounded.to(tl.float32)
    result = normalized(values, scales, size, epsilon)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=within)


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """See `reference.rms_norm`. x and residual are contiguous."""
    out = torch.empty_like(x)
    rows, size = x.shape
    block: int = triton.next_power_of_2(size)
    rms_norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        size,
        epsilon,
        has_residual=residual is not None,
        block=block,
        num_warps=warps_for(block),
        enable_fp_fusion=True,
    )
    return out


def warps_for(block: int) -> int:
    """Warps of a program for rows of `block` columns, a power of two."""
    return min(max(block // WARP_COLUMNS, 1), MAX_WARPS)
