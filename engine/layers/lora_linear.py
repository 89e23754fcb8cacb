"""A base projection and the adapters that act on it."""

import torch

from loraplex.engine.kernels.sgmv import sgmv
from loraplex.engine.layers.base_linear import BaseLinear
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.lora.site import LoraSite


class LoraLinear:
    """y = base(x) plus, for rows with an adapter, B A x."""

    def __init__(self, base: BaseLinear, site: LoraSite) -> None:
        self.base = base
        self._site = site

    def __call__(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        """x [rows, inputs] -> [rows, outputs]. A batch without adapters pays one comparison."""
        y = self.base(x)
        if lora is not None and self._site.slots:
            sgmv(x, y, self._site, lora)
        return y
