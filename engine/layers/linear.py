"""The kinds of base projections, and `make_linear`, which chooses one by weight, type and device."""

from collections.abc import Hashable

import torch
import torch.nn.functional as F

from loraplex.engine.kernels.dispatch import KernelBackend, backend_for
from loraplex.engine.kernels.quantized_linear import quantized_linear, tiling
from loraplex.engine.layers.base_linear import BaseLinear, FixedRowsLinear
from loraplex.engine.quantization.quantized_weight import QuantizedWeight, WeightFormat, dequantize

_PACK_ROWS = 16
"""The row count that the packed layout is chosen for: a decode batch."""

_LONGEST_SINGLE_SUM = 1024
"""Above this many inputs oneDNN sums a lone row in another order than several rows (tried: 64 to 4096). Without AVX512-BF16
it does so for fewer in bfloat16, too."""

_TILED_ROWS = 32
"""With AMX oneDNN sums alike up to so many rows, and in several orders above (tried: 1 to 512 rows, 64 to 11008 inputs)."""


class Linear(BaseLinear):
    """y = x W^T + b with W [outputs, inputs], laid out once for the device's matrix product.

    On a CPU oneDNN otherwise reorders the weight in every call: at 16 rows that is 40 % of the time of a step's GEMMs.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self._bias = bias
        self._packed = weight.device.type == "cpu" and torch._C._has_mkldnn
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
            if self._packed
            else weight
        )
        processor = torch.cpu.get_capabilities() if self._packed and weight.dtype is torch.bfloat16 else {}
        self._most_rows = _TILED_ROWS if processor.get("amx_bf16") else None
        self._lone_differs = self._most_rows is None and (
            self.inputs > _LONGEST_SINGLE_SUM or not processor.get("avx512_bf16", True)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        # Batch invariance: all rows are summed alike.
        if self._most_rows is not None and x.shape[0] > self._most_rows:
            return torch.cat([self._product(rows) for rows in torch.split(x, self._most_rows)])
        if self._lone_differs and x.shape[0] == 1:
            return self._product(x.repeat(2, 1))[:1]
        return self._product(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


class QuantizedLinear(BaseLinear):
    """y = x W^T + b with W in integers and scales. A row's result does not depend on the other rows."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return quantized_linear(x, self._weight, bias=self._bias)

    @property
    def layout(self) -> Hashable:
        weight = self._weight
        return weight.format, weight.shape, weight.group_size, weight.zeros is None, self._bias is None

    def tiling(self, rows: int, dtype: torch.dtype) -> Hashable:
        return tiling(rows, self._weight, dtype)


def make_linear(
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    deterministic: bool = False,
) -> BaseLinear:
    """Return the layer that computes in `dtype`; with `deterministic` its sums do not depend on the number of rows.

    float32 on a CPU asks for exactness: integers are dequantized there once, and no row is rounded.
    """
    linear = _linear(weight, bias, dtype)
    # The kernels of `kernels/cpu/` sum in one order at every number of rows.
    is_padded = deterministic and isinstance(linear, Linear | QuantizedLinear)
    return FixedRowsLinear(linear) if is_padded else linear


def _linear(
    weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> BaseLinear:
    if not isinstance(weight, QuantizedWeight):
        return _dense_linear(weight, bias)
    if weight.packed.device.type == "cpu" and dtype is torch.float32:
        return Linear(dequantize(weight), bias)
    if weight.format is not WeightFormat.FP8 and backend_for(weight.packed) is KernelBackend.COMPILED:
        # Imported here for the same reason as in `kernels/dispatch.py`.
        from loraplex.engine.layers.cpu_linear import IntegerLinear

        return IntegerLinear(weight, bias)
    return QuantizedLinear(weight, bias)


def _dense_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> BaseLinear:
    if weight.dtype is torch.bfloat16 and backend_for(weight) is KernelBackend.COMPILED:
        from loraplex.engine.layers.cpu_linear import BFloat16Linear, is_faster_than_torch

        if is_faster_than_torch():
            return BFloat16Linear(weight, bias)
    return Linear(weight, bias)
