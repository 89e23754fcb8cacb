"""Which of a model's parameters a scheme quantizes, and to what format: rounded to nearest, one parameter at a time.

Invariant: embeddings, norms and biases are never quantized; adapters act on top in the model's own type.
"""

import torch

from loraplex.engine.errors import ModelError
from loraplex.engine.quantization.checkpoint_format import StoredWeights
from loraplex.engine.quantization.gptq import quantize_gptq
from loraplex.engine.quantization.groups import largest_group
from loraplex.engine.quantization.quantized_weight import (
    QuantizedWeight,
    by_rows,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)

NONE = "none"
FP8 = "fp8"
SCHEMES = (NONE, "int8", "int4", FP8)
_FP8_CAPABILITY = (8, 9)
"""From this compute capability on, a device multiplies fp8."""
_PROJECTIONS = frozenset({"qkv", "o", "gate_up", "down", "lm_head"})


def check_scheme(scheme: str, device: torch.device) -> None:
    """Check a scheme. Raises `ModelError` for a scheme that does not exist or that `device` cannot multiply."""
    if scheme not in SCHEMES:
        raise ModelError(f"`quantization` must be one of {', '.join(SCHEMES)}, got {scheme!r}")
    if scheme != FP8:
        return
    if device.type != "cuda":
        raise ModelError(
            f"`quantization` fp8 needs a CUDA device; allowed on {device.type}: none, int8, int4"
        )
    if torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise ModelError("weights in fp8 need a CUDA device of compute capability 8.9 or later")


def check_stored(stored: StoredWeights | None, device: torch.device) -> None:
    """Check a checkpoint's weights. Raises `ModelError` if `device` cannot multiply them; on a CPU the reference takes
    all.
    """
    targets = () if stored is None else stored.targets.values()
    if device.type == "cuda" and any(weight.is_float for weight in targets):
        check_scheme(FP8, device)


def quantize_parameter(
    name: str, weight: torch.Tensor, scheme: str, moments: torch.Tensor | None = None
) -> torch.Tensor | QuantizedWeight:
    """Quantize `weight` [outputs, inputs] of the decoder's parameter `name` in `scheme`, or return it unchanged.

    int8 and fp8 have one scale per output. int4 shares scales and zero points in the largest groups that divide the inputs,
    and is fitted to the second `moments` of its inputs if they are known (GPTQ). The head then takes int8, because its
    errors reach the response unmixed. Raises `ModelError` for values that are not finite.
    """
    if scheme == NONE or name.rpartition(".")[2] not in _PROJECTIONS:
        return weight
    try:
        if scheme == FP8:
            return by_rows(weight, quantize_fp8)
        if scheme == "int8" or name == "lm_head":
            return by_rows(weight, quantize_int8)
        if moments is not None:
            return quantize_gptq(weight, moments, largest_group(weight.shape[1]), symmetric=False)
        group_size = largest_group(weight.shape[1])
        return by_rows(weight, lambda rows: quantize_int4(rows, group_size, symmetric=False))
    except ValueError as error:
        raise ModelError(f"parameter {name!r} cannot be quantized: {error}") from error
