"""int4 rounding that compensates its own errors (GPTQ, Frantar et al. 2023): each input's error goes to the inputs after
it.

Invariant: the result is an ordinary `QuantizedWeight`; for inputs that never vary together it equals rounding to nearest.
"""

import torch

from loraplex.engine.quantization.quantized_weight import QuantizedWeight, int4_parameters, int4_weight

DAMPING = 0.01
"""Share of the mean second moment that is added to each input's own, so that the inverse exists."""
BLOCK = 128
"""Inputs between two updates of all later inputs: within a block errors go only to that block."""


def quantize_gptq(
    weight: torch.Tensor, moments: torch.Tensor, group_size: int, *, symmetric: bool
) -> QuantizedWeight:
    """weight [outputs, inputs], moments float32 [inputs, inputs] of its inputs. ValueError for values that are not finite."""
    if not weight.isfinite().all() or not moments.isfinite().all():
        raise ValueError("weight or inputs have values that are not finite")
    rest = weight.float().clone()
    inverse = _inverse_factor(moments)
    inputs = weight.shape[1]
    integers = torch.empty_like(rest, dtype=torch.uint8)
    scales: list[torch.Tensor] = []
    zeros: list[torch.Tensor] = []
    errors = rest.new_zeros(rest.shape[0], BLOCK)
    for begin in range(0, inputs, BLOCK):
        end = min(begin + BLOCK, inputs)
        for column in range(begin, end):
            if column % group_size == 0:
                # Groups contain the errors so far, also where a group reaches beyond the block.
                scale, zero = int4_parameters(rest[:, column : column + group_size], symmetric=symmetric)
                scales.append(scale)
                zeros.append(zero)
            values = rest[:, column]
            rounded = (values / scales[-1].float()).round_().add_(zeros[-1]).clamp_(0, 15)
            integers[:, column] = rounded.to(torch.uint8)
            error = (values - (rounded - zeros[-1]) * scales[-1].float()) / inverse[column, column]
            rest[:, column:end] -= error[:, None] * inverse[column, column:end]
            errors[:, column - begin] = error
        rest[:, end:] -= errors[:, : end - begin] @ inverse[begin:end, end:]
    return int4_weight(integers, torch.stack(scales), None if symmetric else torch.stack(zeros), group_size)


def _inverse_factor(moments: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of the damped moments, in float64 where precision matters."""
    damped = moments.double()
    diagonal = damped.diagonal()
    # An input that is always zero has no error.
    diagonal += torch.where(diagonal == 0, 1.0, 0.0)
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()
