"""A base projection and the adapters that act on it."""

import torch

from loraplex.engine.kernels.sgmv import expand, sgmv, shrink
from loraplex.engine.layers.base_linear import BaseLinear
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.lora.device_batch import DeviceLoraBatch, LoraPath, PendingDelta
from loraplex.engine.lora.site import LoraSite


class LoraLinear:
    """y = base(x) plus, for rows with an adapter, B A x."""

    def __init__(self, base: BaseLinear, site: LoraSite) -> None:
        self.base = base
        self._site = site

    def __call__(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        """x [rows, inputs] -> [rows, outputs]. A batch without adapters costs one comparison."""
        if lora is None or not lora.acts_at(self._site):
            return self.base(x)
        if isinstance(lora, DeviceLoraBatch):
            # Both need x alone, so the device computes them in parallel.
            hidden = shrink(x, self._site, lora)
            y = self.base(x)
            expand(hidden, y, self._site, lora)
        else:
            y = self.base(x)
            sgmv(x, y, self._site, lora)
        return y

    def deferred(self, x: torch.Tensor, lora: LoraBatch | None) -> tuple[torch.Tensor, PendingDelta | None]:
        """Return y, and the delta that the consumer adds as it reads: in steps of few adapters that saves a kernel."""
        if isinstance(lora, DeviceLoraBatch) and lora.path is LoraPath.FOLDED and lora.acts_at(self._site):
            hidden = shrink(x, self._site, lora)
            return self.base(x), PendingDelta(hidden, self._site, lora)
        return self(x, lora), None
