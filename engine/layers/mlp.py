"""The gated MLP of one layer (Shazeer 2020)."""

import torch

from loraplex.engine.kernels.silu_mul import silu_mul
from loraplex.engine.layers.lora_linear import LoraLinear
from loraplex.engine.lora.batch import LoraBatch


class MLP:
    """down(silu(gate(x)) * up(x)) with gate and up fused."""

    def __init__(self, gate_up: LoraLinear, down: LoraLinear) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        """x [rows, hidden] -> [rows, hidden]."""
        return self._down(silu_mul(self._gate_up(x, lora)), lora)
