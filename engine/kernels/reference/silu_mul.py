"""SiLU(gate) * up in torch."""

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [rows, 2 * intermediate], gate first -> [rows, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
