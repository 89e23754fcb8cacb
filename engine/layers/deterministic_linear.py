"""A base projection that always multiplies the same number of rows, for engines with `deterministic`.

Invariant: a row's sums run in one order whatever the other rows. Libraries choose a kernel, and so the order, by the number
of rows; here there is only one number.
"""

from collections.abc import Hashable

import torch
import torch.nn.functional as F

from loraplex.engine.layers.base_linear import BaseLinear

ROWS = 64
"""Rows of a product: a decode batch reads the weights once, a chunk of a prompt once per so many tokens."""


class FixedRowsLinear:
    """The same as `base`, in products of `ROWS` rows, padded with zeros."""

    def __init__(self, base: BaseLinear) -> None:
        self.inputs, self.outputs = base.inputs, base.outputs
        self._base = base

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] -> [rows, outputs], a new tensor."""
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -rows % ROWS))
        products = [self._base(part) for part in torch.split(padded, ROWS)]
        return (products[0] if len(products) == 1 else torch.cat(products))[:rows]

    @property
    def layout(self) -> Hashable:
        return self._base.layout

    def tiling(self, rows: int, dtype: torch.dtype) -> Hashable:
        return None
