"""A linear layer whose weight is laid out once for the device's matrix product.

On a CPU oneDNN otherwise reorders the weight in every call: at 16 rows that is 40 % of the time of a step's GEMMs.
"""

from collections.abc import Hashable

import torch
import torch.nn.functional as F

_PACK_ROWS = 16
"""The row count that the packed layout is chosen for: a decode batch."""

_LONGEST_SINGLE_SUM = 1024
"""Above this many inputs oneDNN sums a lone row in another order than several rows (tried: 64 to 4096)."""


class Linear:
    """y = x W^T + b with W [outputs, inputs]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self._bias = bias
        self._packed = weight.device.type == "cpu" and torch._C._has_mkldnn
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
            if self._packed
            else weight
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] -> [rows, outputs], a new tensor."""
        if self._packed:
            if x.shape[0] == 1 and self.inputs > _LONGEST_SINGLE_SUM:
                # Batch invariance: compute a lone row twice, so that it is summed like a row among others.
                return self._product(x.repeat(2, 1))[:1]
            return self._product(x)
        return F.linear(x, self._weight, self._bias)

    @property
    def layout(self) -> Hashable:
        return None

    def tiling(self, rows: int, dtype: torch.dtype) -> Hashable:
        return None

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y
