"""Base products: ours in 8 and 4 bits, and torch's own in 16, 8 and 4 bits for comparison."""

import torch
from tests.benchmarks.kernels.problem import DTYPES, Operands, Problem, TensorSource, size_of
from torch import Tensor

from loraplex.engine.kernels.dispatch import KernelBackend, backend_for
from loraplex.engine.kernels.quantized_linear import quantized_linear
from loraplex.engine.layers.linear import make_linear
from loraplex.engine.quantization.groups import span_of
from loraplex.engine.quantization.quantized_weight import (
    QuantizedWeight,
    WeightFormat,
    dequantize,
    quantize_fp8,
)

GROUP = 128
"""Inputs that share a scale of int4."""
OWN = ("int8", "int8 groups", "int4", "int4 zeros", "fp8", "dense")
PEERS = ("torch mm", "torch fp8", "torch int4", "gemlite int4", "humming int4")
"""The last two are packages of their own, imported by their cases alone."""
_LARGEST_FP8 = 448.0


def gemm_problem(
    variant: str,
    rows: int,
    outputs: int,
    inputs: int,
    dtype: str,
    group: int = GROUP,
    *,
    has_bias: bool = False,
) -> Problem:
    """y = x W^T, plus a bias for our integers. `variant` is one of `OWN` and `PEERS`."""
    weight_bytes = {
        "int8": outputs * inputs + 2 * outputs,
        "int8 groups": outputs * inputs + 2 * outputs * inputs // group,
        "int4": outputs * inputs // 2 + 2 * outputs * inputs // group,
        "int4 zeros": outputs * inputs // 2 + 3 * outputs * inputs // group,
        "dense": outputs * inputs * size_of(dtype),
        "torch mm": outputs * inputs * size_of(dtype),
        "fp8": outputs * inputs + 4 * outputs,
        "torch fp8": outputs * inputs + 4 * outputs,
        "torch int4": outputs * inputs // 2 + 4 * outputs * inputs // group,
        "gemlite int4": outputs * inputs // 2 + 4 * outputs * inputs // group,
        "humming int4": outputs * inputs // 2 + 2 * outputs * inputs // group,
    }[variant]

    def make(tensors: TensorSource) -> Operands:
        x = tensors.normal(rows, inputs, dtype=DTYPES[dtype])
        if variant in OWN:
            return _own(tensors, x, variant, outputs, group, has_bias=has_bias)
        return _peer(tensors, x, variant, outputs, group)

    return Problem(
        op="gemm",
        variant=variant + (f" by {group}" if group != GROUP else "") + (" and bias" if has_bias else ""),
        shape={"m": rows, "n": outputs, "k": inputs},
        dtype=dtype,
        bytes=weight_bytes + rows * (inputs + outputs) * size_of(dtype),
        flops=2 * rows * outputs * inputs,
        make=make,
        needs_cuda=variant in ("fp8", *PEERS[1:]),
        is_peer=variant in PEERS,
    )


def _own(
    tensors: TensorSource, x: Tensor, variant: str, outputs: int, group: int, *, has_bias: bool
) -> Operands:
    if variant == "dense":
        dense = tensors.normal(outputs, x.shape[1], dtype=x.dtype, scale=x.shape[1] ** -0.5)
        linear = make_linear(dense, None, x.dtype)
        return Operands(lambda: (linear(x),), lambda: (x.float() @ dense.float().t(),))
    weight = random_weight(tensors, variant, outputs, x.shape[1], group)
    bias = tensors.normal(outputs, dtype=x.dtype) if has_bias else None

    def expected() -> tuple[Tensor, ...]:
        rows = x.float()
        if variant == "fp8":
            # Its rows are rounded too: another kernel's work, and not this product's error.
            rounded, scales = _to_fp8(x)
            rows = rounded.float() * scales
        product = rows @ dequantize(weight).t()
        return (product if bias is None else product + bias.float(),)

    if backend_for(x) is not KernelBackend.TRITON:
        layer = make_linear(weight, bias, x.dtype)
        return Operands(lambda: (layer(x),), expected)
    out = torch.empty_like(x[:, :1]).repeat(1, outputs)

    def run() -> tuple[Tensor, ...]:
        return (quantized_linear(x, weight, out, bias),)

    return Operands(run, expected, poisoned=(out,))


def random_weight(
    tensors: TensorSource, variant: str, outputs: int, inputs: int, group: int
) -> QuantizedWeight:
    """Integers drawn at once: quantizing a drawn weight would take longer than all its products."""
    if variant == "fp8":
        return quantize_fp8(tensors.normal(outputs, inputs, dtype=torch.bfloat16, scale=inputs**-0.5))
    if variant.startswith("int8"):
        groups = 1 if variant == "int8" else -(-inputs // group)
        weight = QuantizedWeight(
            format=WeightFormat.INT8,
            packed=tensors.normal(outputs, inputs, dtype=torch.int8),
            scales=_scales(tensors, groups, outputs, inputs**-0.5 / 40),
            zeros=None,
            group_size=inputs if groups == 1 else group,
            shape=(outputs, inputs),
        )
    else:
        span, groups = span_of(group), -(-inputs // group)
        zeros = tensors.integers(0, 16, groups, outputs, dtype=torch.uint8)
        weight = QuantizedWeight(
            format=WeightFormat.INT4,
            packed=tensors.integers(0, 256, -(-inputs // span), outputs, span // 2, dtype=torch.uint8),
            scales=_scales(tensors, groups, outputs, inputs**-0.5 / 4),
            zeros=zeros if variant == "int4 zeros" else None,
            group_size=group,
            shape=(outputs, inputs),
        )
    return weight


def _scales(tensors: TensorSource, groups: int, outputs: int, scale: float) -> Tensor:
    """Positive, none of them small."""
    return tensors.normal(groups, outputs, dtype=torch.bfloat16, scale=scale / 4).abs_().add_(scale)


def _peer(tensors: TensorSource, x: Tensor, variant: str, outputs: int, group: int) -> Operands:
    inputs = x.shape[1]
    if variant == "torch int4":
        return _torch_int4(tensors, x, outputs, group)
    if variant == "gemlite int4":
        return _gemlite(tensors, x, outputs, group)
    weight = tensors.normal(outputs, inputs, dtype=x.dtype, scale=inputs**-0.5)
    if variant == "torch mm":
        return Operands(lambda: (torch.mm(x, weight.t()),), lambda: (x.float() @ weight.float().t(),))
    return _scaled_mm(x, weight) if variant == "torch fp8" else _humming(x, weight, group)


def _torch_int4(tensors: TensorSource, x: Tensor, outputs: int, group: int) -> Operands:
    """torch's kernel takes its own layout, which only the device's operator makes from integers on that device."""
    inputs = x.shape[1]
    integers = tensors.integers(0, 256, outputs, inputs // 2, dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(integers, 8)
    affine = tensors.normal(inputs // group, outputs, 2, dtype=torch.bfloat16, scale=inputs**-0.5 / 4)

    def run() -> tuple[Tensor, ...]:
        return (torch.ops.aten._weight_int4pack_mm(x, packed, group, affine),)

    return Operands(run, lambda: (x.float() @ _from_nibbles(integers, affine, group).t(),))


def _gemlite(tensors: TensorSource, x: Tensor, outputs: int, group: int) -> Operands:
    """w = (q - zero) * scale, group by group."""
    from gemlite import DType, GemLiteLinear

    inputs = x.shape[1]
    integers = tensors.integers(0, 16, outputs, inputs, dtype=torch.uint8)
    scales = _scales(tensors, outputs * inputs // group, 1, inputs**-0.5 / 4)
    zeros = tensors.integers(0, 16, outputs * inputs // group, 1, dtype=torch.uint8).to(x.dtype)
    types = {"input_dtype": DType.BF16, "output_dtype": DType.BF16}
    layer = GemLiteLinear(4, group_size=group, in_features=inputs, out_features=outputs, **types)
    layer.pack(integers, scales, zeros, None)
    dense = (integers.view(-1, group).float() - zeros.float()) * scales.float()
    return Operands(lambda: (layer(x),), lambda: (x.float() @ dense.view(outputs, inputs).t(),))


def _humming(x: Tensor, weight: Tensor, group: int) -> Operands:
    """It rounds the weight itself, so that nothing exact is expected of it."""
    from humming.layer import HummingLayer

    outputs, inputs = weight.shape
    form = {"dtype": "int4", "weight_scale_group_size": group}
    layer = HummingLayer(shape_n=outputs, shape_k=inputs, weight_config=form, torch_dtype=x.dtype)
    layer = layer.to(x.device)
    layer.load_from_unquantized(weight)
    layer.transform()
    return Operands(lambda: (layer(x),), lambda: (x.float() @ weight.float().t(),))


def _scaled_mm(x: Tensor, weight: Tensor) -> Operands:
    """Row-wise scales on both sides, made once: quantizing the rows is another kernel's work."""
    rows, row_scales = _to_fp8(x)
    columns, column_scales = _to_fp8(weight)

    def run() -> tuple[Tensor, ...]:
        product = torch._scaled_mm(
            rows, columns.t(), scale_a=row_scales, scale_b=column_scales.t(), out_dtype=torch.bfloat16
        )
        return (product,)

    return Operands(
        run, lambda: ((rows.float() * row_scales) @ (columns.float() * column_scales).t().contiguous(),)
    )


def round_rows_problem(rows: int, inputs: int, dtype: str) -> Problem:
    """The rows of an fp8 product to fp8, each by its own largest value."""

    def make(tensors: TensorSource) -> Operands:
        from loraplex.engine.kernels.fp8_linear import round_rows

        x = tensors.normal(rows, inputs, dtype=DTYPES[dtype])
        return Operands(lambda: round_rows(x), lambda: _rounded(x))

    return Problem(
        op="round rows",
        variant="fp8",
        shape={"rows": rows, "inputs": inputs},
        dtype=dtype,
        bytes=rows * (inputs * (size_of(dtype) + 1) + 4),
        flops=3 * rows * inputs,
        make=make,
        needs_cuda=True,
    )


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    rounded, scales = _to_fp8(x)
    return rounded.float(), scales


def _to_fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    scales = matrix.float().abs().amax(dim=1, keepdim=True) / _LARGEST_FP8
    return (matrix.float() / scales).to(torch.float8_e4m3fn), scales


def _from_nibbles(integers: Tensor, affine: Tensor, group: int) -> Tensor:
    """torch's layout: the high nibble is the first of two inputs; w = (q - 8) * scale + zero."""
    nibbles = torch.stack((integers >> 4, integers & 15), dim=2).flatten(1).float() - 8
    scales, zeros = (affine[..., i].float().t().repeat_interleave(group, dim=1) for i in (0, 1))
    return nibbles * scales + zeros
