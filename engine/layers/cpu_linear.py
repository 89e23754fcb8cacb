"""Linear layers of a CPU with one kernel for every number of rows: a row's result is bitwise independent of the other rows."""

import torch

from loraplex.engine.kernels.cpu import integer_weight
from loraplex.engine.kernels.cpu.bfloat16_linear import bfloat16_linear, lay_out
from loraplex.engine.kernels.cpu.integer_linear import integer_linear
from loraplex.engine.kernels.cpu.llvm_vectors import has_matrix_products
from loraplex.engine.layers.base_linear import BaseLinear
from loraplex.engine.quantization.quantized_weight import QuantizedWeight


def is_faster_than_torch() -> bool:
    """False on CPUs with matrix instructions, which torch's products use: a prompt is several times faster there."""
    return not has_matrix_products()


class BFloat16Linear(BaseLinear):
    """A weight in bfloat16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self._weight = lay_out(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return bfloat16_linear(x.contiguous(), self._weight)


class IntegerLinear(BaseLinear):
    """A weight that stays in 8 or 4 bits, with integer products, for bfloat16 and float16."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self._weight = integer_weight.lay_out(weight, bias)

    @property
    def num_bytes(self) -> int:
        """Bytes that the layer stores and a product streams."""
        return self._weight.tiles.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return integer_linear(x.contiguous(), self._weight)
