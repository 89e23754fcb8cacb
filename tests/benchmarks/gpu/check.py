"""A kernel's outputs against float32: fresh random operands, outputs and scratch poisoned, nothing averaged away.

Invariant: memory that a kernel leaves as it was shows, be it an output (a NaN of known bits) or scratch (any NaN).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tests.benchmarks.kernels.problem import Problem, RandomTensors
from torch import Tensor

MAX_ERROR = {torch.bfloat16: 1e-2, torch.float16: 4e-3, torch.float32: 1e-5}
"""|out - expected| / |expected| over all elements."""
MAX_WORST = 0.15
"""The largest single error in units of the expected values' root mean square: rounding stays below, a wrong tile does not."""
MAX_WORST_FP8 = 1.0
"""The same of values stored in fp8, of which one that lies between two neighbours may go either way."""
_POISON = {2: (torch.int16, 0x7FA5), 4: (torch.int32, 0x7FA5A5A5)}


@dataclass(slots=True)
class CheckResult:
    """Counts are of elements, over all outputs; errors are those of the worst output."""

    rel_err: float = 0.0
    worst: float = 0.0
    nan: int = 0
    unwritten: int = 0
    ok: bool = True

    def add(self, out: Tensor, expected: Tensor, max_worst: float = MAX_WORST) -> None:
        """Take one output into account."""
        integers, poison = _POISON[out.element_size()]
        unwritten = out.view(integers) == poison
        finite = expected.isfinite()
        wrong = (out.isnan() & ~expected.isnan()) | (~finite & (out.float() != expected) & ~expected.isnan())
        self.unwritten += int(unwritten.sum())
        self.nan += int((wrong & ~unwritten).sum())
        error = torch.where(finite, out.float() - expected, 0.0).nan_to_num_(nan=0.0)
        size = torch.where(finite, expected, 0.0)
        norm = float(size.norm()) or 1.0
        rel_err = float(error.norm()) / norm
        worst = float(error.abs().max()) * expected.numel() ** 0.5 / norm
        self.rel_err, self.worst = max(self.rel_err, rel_err), max(self.worst, worst)
        fits = rel_err < MAX_ERROR[out.dtype] and worst < max_worst
        self.ok = self.ok and fits and not self.unwritten and not self.nan


def check(problem: Problem, device: torch.device, seed: int) -> CheckResult:
    """Run it once on operands of its own."""
    with fresh_memory_is_nan():
        operands = problem.make(RandomTensors(device, seed))
        expected = operands.expected()
        for tensor in operands.poisoned:
            poison(tensor)
        outputs = operands.run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    verdict = CheckResult()
    for out, wanted in zip(outputs, expected, strict=True):
        if out.element_size() > 1:
            verdict.add(out.contiguous(), wanted)
        else:
            verdict.add(out.to(torch.bfloat16), wanted.to(out.dtype).float(), MAX_WORST_FP8)
    return verdict


def poison(tensor: Tensor) -> None:
    """Fill with a NaN that no arithmetic makes."""
    integers, value = _POISON[tensor.element_size()]
    tensor.view(integers).fill_(value)


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """What `torch.empty` gives is NaN within."""
    before: Any = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
