"""The product with a quantized weight by torch's packed CPU products, for bfloat16 rows.

Invariant: int8 of a few rows and int4 keep the rows as they are; int8 of more rows rounds each row to int8 by its own
largest value, which is exact integer arithmetic from there on, so that a row's result has nothing of its neighbours.
"""

from dataclasses import replace

import torch

from loraplex.engine.quantization.nibbles import unpack_nibbles
from loraplex.engine.quantization.weight import CpuInt4, QuantizedWeight, WeightFormat

LEAST_INTEGER_ROWS = 5
"""From so many rows on the integer product is faster, its rounding of the rows included (tried: 576 x 1536, bfloat16)."""
_INPUTS_MULTIPLE = 16
"""torch's packed int8 product reads beyond rows of another length (tried with 2.13: wrong sums and crashes)."""
_OUTPUTS_MULTIPLE = 16
"""What torch's packed int4 product divides its outputs by; its inputs are whole groups."""


def with_cpu_layout(weight: QuantizedWeight) -> QuantizedWeight:
    """An int4 weight with what the CPU's product reads beside it, where its shape allows; other weights as they are."""
    if weight.format is not WeightFormat.INT4 or weight.packed.device.type != "cpu":
        return weight
    if weight.outputs % _OUTPUTS_MULTIPLE or weight.inputs % weight.group_size:
        return weight
    integers = unpack_nibbles(weight.packed, weight.group_size, weight.inputs).to(torch.int32)
    scales = weight.scales.float()
    zeros = torch.full_like(scales, 8) if weight.zeros is None else weight.zeros.float()
    return replace(
        weight,
        cpu_int4=CpuInt4(
            packed=torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 1),
            affine=torch.stack((scales, (8 - zeros) * scales), dim=2).to(torch.bfloat16),
        ),
    )


def serves(x: torch.Tensor, weight: QuantizedWeight) -> bool:
    """Whether there is a packed product for it here."""
    if x.device.type != "cpu" or x.dtype is not torch.bfloat16:
        return False
    if weight.format is WeightFormat.INT4:
        return weight.cpu_int4 is not None
    return weight.format is WeightFormat.INT8 and weight.is_per_channel


def keeps_rows(rows: int, weight: QuantizedWeight) -> bool:
    """Whether int8 is multiplied with the rows as they are, not rounded to int8 themselves."""
    return rows < LEAST_INTEGER_ROWS and weight.inputs % _INPUTS_MULTIPLE == 0


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, out: torch.Tensor) -> None:
    """See `reference.quantized_linear`; only where `serves` says so. x contiguous."""
    if weight.cpu_int4 is not None:
        packed, affine = weight.cpu_int4.packed, weight.cpu_int4.affine
        out.copy_(torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, weight.group_size, affine))
    elif keeps_rows(x.shape[0], weight):
        scales = weight.scales[0].to(torch.bfloat16)
        out.copy_(torch.ops.aten._weight_int8pack_mm(x, weight.packed, scales))
    else:
        _integer_product(x, weight, out)


def _integer_product(x: torch.Tensor, weight: QuantizedWeight, out: torch.Tensor) -> None:
    rows = x.float()
    # A row that is not finite makes its own scale, and so its whole result, not finite.
    scales = rows.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny).div_(127)
    integers = rows.div_(scales).round_().nan_to_num_(nan=0.0).clamp_(-127, 127).to(torch.int8)
    sums = torch._int_mm(integers, weight.packed.t())
    out.copy_(sums.float().mul_(scales).mul_(weight.scales.float()))
