"""Adapters in 8 bits: each rank row of A and of B has its own scale; the kernel applies the product of both per rank.

Invariant: delta(x) = sum over r of (x . qA[r]) * scales[r] * qB[r]; its difference from B A is known for every module.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.engine.errors import AdapterInexact
from loraplex.engine.lora.weights import LoraModule

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The greatest value of each page type; a row's greatest value is mapped to it."""


@dataclass(frozen=True, slots=True)
class QuantizedModule:
    """A [rank, in] and B [rank, out] in the page type; the scales, fp32 [rank], of each; `error` as `relative_error`."""

    a: Tensor
    b: Tensor
    a_scales: Tensor
    b_scales: Tensor
    error: float

    @property
    def scales(self) -> Tensor:
        """Factors of x . qA in a kernel: fp32 [rank]."""
        return self.a_scales * self.b_scales

    def dequantized(self, dtype: torch.dtype) -> LoraModule:
        """Return the module that these pages represent."""
        a = self.a.float() * self.a_scales.unsqueeze(1)
        b = self.b.float() * self.b_scales.unsqueeze(1)
        return LoraModule(a.to(dtype), b.t().to(dtype))


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """The relative Frobenius error of each module's delta, for one adapter."""

    errors: Mapping[str, float]

    @property
    def worst_module(self) -> str:
        return max(self.errors, key=lambda name: self.errors[name], default="")

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0)

    def require(self, digest: str, bound: float) -> None:
        """Check the bound. Raises `AdapterInexact` naming the worst module."""
        if self.worst > bound:
            raise AdapterInexact(
                f"adapter {digest} does not survive 8-bit pages: the delta of {self.worst_module!r} changes by"
                f" {self.worst:.3g} of its norm; allowed is {bound:g}"
            )


def quantize_module(module: LoraModule, dtype: torch.dtype) -> QuantizedModule:
    """Quantize `module` to pages of `dtype` (int8 or float8_e4m3fn), with scales that keep each row's greatest value
    exact.
    """
    a, b = module.a.float(), module.b.t().float().contiguous()
    qa, a_scales = _quantize_rows(a, dtype)
    qb, b_scales = _quantize_rows(b, dtype)
    a_error = a - qa.float() * a_scales.unsqueeze(1)
    b_error = b - qb.float() * b_scales.unsqueeze(1)
    return QuantizedModule(qa, qb, a_scales, b_scales, relative_error(a, b, a_error, b_error))


def relative_error(a: Tensor, b: Tensor, a_error: Tensor, b_error: Tensor) -> float:
    """|BA - B'A'| / |BA| in Frobenius norms, rows [rank, width], through Gram matrices: no [out, in] is ever made.

    BA - B'A' = (B - B')A + B'(A - A') contains no difference of nearly equal numbers. 0 where BA is 0, infinite where it is
    not finite. fp32 suffices.
    """
    left = torch.cat((b_error, b - b_error))
    right = torch.cat((a, a_error))
    difference = ((left @ left.t()) * (right @ right.t())).sum().clamp(min=0)
    whole = ((b @ b.t()) * (a @ a.t())).sum()
    if not torch.isfinite(difference + whole) or (whole <= 0 and difference > 0):
        return math.inf
    return math.sqrt(float(difference) / float(whole)) if whole > 0 else 0.0


def _quantize_rows(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    largest = LARGEST[dtype]
    scales = rows.abs().amax(dim=1) / largest
    scaled = rows / torch.where(scales > 0, scales, 1.0).unsqueeze(1)
    if dtype is torch.int8:
        scaled = scaled.round()
    return scaled.clamp(-largest, largest).to(dtype), scales
