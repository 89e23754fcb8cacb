"""`BaseLinear`: a base projection; `FixedRowsLinear`: the same one in products of a fixed number of rows."""

from abc import ABC, abstractmethod
from collections.abc import Hashable

import torch
import torch.nn.functional as F

ROWS = 64
"""Rows of a product: a decode batch reads the weights once, a chunk of a prompt once per so many tokens."""


class BaseLinear(ABC):
    """y = x W^T + b. x [rows, inputs] -> [rows, outputs], a new tensor."""

    inputs: int
    outputs: int

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    @property
    def layout(self) -> Hashable:
        """Equal for projections whose products are compiled alike at every number of rows."""
        return None

    def tiling(self, rows: int, dtype: torch.dtype) -> Hashable:
        """Equal for numbers of rows whose products run the same machine code; None where all do."""
        return None


class FixedRowsLinear(BaseLinear):
    """The same as `base`, in products of `ROWS` rows, padded with zeros, for engines with `deterministic`.

    Invariant: a row's sums run in one order whatever the other rows. Libraries choose a kernel, and so the order, by the
    number of rows; here there is only one number.
    """

    def __init__(self, base: BaseLinear) -> None:
        self.inputs, self.outputs = base.inputs, base.outputs
        self._base = base

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -rows % ROWS))
        products = [self._base(part) for part in torch.split(padded, ROWS)]
        return (products[0] if len(products) == 1 else torch.cat(products))[:rows]

    @property
    def layout(self) -> Hashable:
        return self._base.layout
