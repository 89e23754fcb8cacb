"""The product with a quantized weight in torch: dequantize, multiply in fp32, round once. What every body means."""

import torch

from loraplex.engine.quantization.weight import QuantizedWeight, dequantize


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, out: torch.Tensor) -> None:
    """out[rows, outputs] = x[rows, inputs] @ dequantized.T; `out` has the dtype of x."""
    out.copy_(x.float() @ dequantize(weight).t())
