"""A linear layer whose weight stays in 8 or 4 bits on a CPU, with integer products."""

from collections.abc import Hashable

import torch

from loraplex.engine.kernels.cpu.integer_linear import integer_linear
from loraplex.engine.kernels.cpu.integer_weight import lay_out
from loraplex.engine.quantization.quantized_weight import QuantizedWeight


class IntegerLinear:
    """y = x W^T + b for bfloat16 and float16. A row's result is bitwise independent of the other rows."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self._weight = lay_out(weight, bias)

    @property
    def num_bytes(self) -> int:
        """Bytes that the layer stores and a product streams."""
        return self._weight.tiles.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] -> [rows, outputs], a new tensor."""
        return integer_linear(x.contiguous(), self._weight)

    @property
    def layout(self) -> Hashable:
        return None

    def tiling(self, rows: int, dtype: torch.dtype) -> Hashable:
        return None
