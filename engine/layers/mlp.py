"""The gated MLP of one layer (Shazeer 2020)."""

import torch

from loraplex.engine.kernels.silu_mul import silu_mul
from loraplex.engine.layers.lora_linear import LoraLinear
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.lora.device_batch import PendingDelta


class MLP:
    """down(silu(gate(x)) * up(x)) with gate and up fused."""

    def __init__(self, gate_up: LoraLinear, down: LoraLinear) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: torch.Tensor, lora: LoraBatch | None) -> tuple[torch.Tensor, PendingDelta | None]:
        """x [rows, hidden] -> [rows, hidden], and the delta still to be added to it."""
        gate_up, delta = self._gate_up.deferred(x, lora)
        return self._down.deferred(silu_mul(gate_up, delta), lora)
