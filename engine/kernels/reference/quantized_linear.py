"""The product with a quantized weight in torch: dequantize, multiply in fp32, round once. The specification of every
backend.
"""

import torch

from loraplex.engine.quantization.quantized_weight import QuantizedWeight, dequantize


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, out: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """out[rows, outputs] = x[rows, inputs] @ dequantized.T + bias[outputs]; `out` has the dtype of x."""
    y = x.float() @ dequantize(weight).t()
    out.copy_(y if bias is None else y.add_(bias))
