"""`Problem`: one call of one kernel at one shape, with its operands' maker, its bytes and its operations.

Invariant: `bytes` is the least that a call must move (each input read once, each output written once), whatever a body does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class TensorSource(Protocol):
    """Where operands come from: random ones to compute with, or uninitialized memory to compile for."""

    device: torch.device

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Normally distributed values of this deviation; for 8-bit integers their rounded 40-fold."""
        ...

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        """Uniform over low ... high - 1."""
        ...

    def permutation(self, count: int, dtype: torch.dtype) -> Tensor:
        """0 ... count - 1 in any order."""
        ...


@dataclass(frozen=True, slots=True)
class Operands:
    """One set of operands. `run` returns what it wrote; `poisoned` of it exists before and may be overwritten first.

    `expected` gives the same outputs in float32 and must be asked before `run`.
    """

    run: Callable[[], tuple[Tensor, ...]]
    expected: Callable[[], tuple[Tensor, ...]]
    poisoned: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """`shape` in elements, `dtype` of the rows; `variant` names what else distinguishes a call.

    `is_peer`: another library's kernel, which is timed beside ours; it is neither compiled nor checked by us.
    """

    op: str
    variant: str
    shape: Mapping[str, int]
    dtype: str
    bytes: int
    flops: int
    make: Callable[[TensorSource], Operands]
    needs_cuda: bool = False
    is_peer: bool = False

    @property
    def name(self) -> str:
        """Unique among the problems of a run."""
        sizes = "-".join(f"{key}{value}" for key, value in self.shape.items())
        return f"{self.op}/{self.variant}/{sizes}/{self.dtype}"


class RandomTensors:
    """Random operands on a device; the same for the same seed."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self._generator, device=self.device, dtype=self._drawn(dtype))
        if dtype is torch.int8:
            return values.mul_(40).round_().clamp_(-127, 127).to(dtype)
        return values.mul_(scale).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator, device=self.device, dtype=dtype)

    def permutation(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.randperm(count, generator=self._generator, device=self.device).to(dtype)

    def _drawn(self, dtype: torch.dtype) -> torch.dtype:
        """Half the memory while a large operand is drawn, where that loses nothing."""
        return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32


DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


def widened(tensor: Tensor) -> Tensor:
    """A copy in float32, also of what is float32 already."""
    return tensor.to(torch.float32, copy=True)


def size_of(dtype: str) -> int:
    """Bytes of an element."""
    return DTYPES[dtype].itemsize
