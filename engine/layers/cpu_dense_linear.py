"""A linear layer in bfloat16 on a CPU: one kernel for every number of rows."""

from collections.abc import Hashable

import torch

from loraplex.engine.kernels.cpu.bfloat16_linear import bfloat16_linear, lay_out
from loraplex.engine.kernels.cpu.llvm_vectors import has_matrix_products


def is_faster_than_torch() -> bool:
    """False on CPUs with matrix instructions, which torch's products use: a prompt is several times faster there."""
    return not has_matrix_products()


class BFloat16Linear:
    """y = x W^T + b. A row's result is bitwise independent of the other rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self._weight = lay_out(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] -> [rows, outputs], a new tensor."""
        return bfloat16_linear(x.contiguous(), self._weight)

    @property
    def layout(self) -> Hashable:
        return None

    def tiling(self, rows: int, dtype: torch.dtype) -> Hashable:
        return None
