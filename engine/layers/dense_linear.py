"""A linear layer whose weight is laid out once for the device's matrix product.

On a CPU oneDNN otherwise reorders the weight in every call: at 16 rows that is 40 % of the time of a step's GEMMs.
"""

import torch
import torch.nn.functional as F

from loraplex.engine.layers.base_linear import BaseLinear

_PACK_ROWS = 16
"""The row count that the packed layout is chosen for: a decode batch."""

_LONGEST_SINGLE_SUM = 1024
"""Above this many inputs oneDNN sums a lone row in another order than several rows (tried: 64 to 4096). Without AVX512-BF16
it does so for fewer in bfloat16, too."""

_TILED_ROWS = 32
"""With AMX oneDNN sums alike up to so many rows, and in several orders above (tried: 1 to 512 rows, 64 to 11008 inputs)."""


class Linear(BaseLinear):
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
