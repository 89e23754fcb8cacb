"""Launches of Triton kernels compiled for sm_90 without a GPU, exactly as a launch on one would: the wrappers run as they are.

Invariant: no kernel runs and no operand is read; signature, constants, divisibility and options are what Triton's own
binder makes of the arguments. Only for a process of its own: the driver is replaced for good.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from loraplex.engine.kernels import dispatch

HOPPER = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One launch. `constants` by argument name, `options` as num_warps and num_stages."""

    kernel: str
    binary: Any
    constants: dict[str, Any]
    seconds: float

    @property
    def num_warps(self) -> int:
        return int(self.binary.metadata.num_warps)


class HopperDriver:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_device_interface(self) -> Any:
        return torch.cuda

    @classmethod
    def is_active(cls) -> bool:
        return True


class DeviceTensor(Tensor):
    """A tensor that says it is on CUDA, so that every choice falls as it does there."""

    is_cuda = True


class UnfilledTensors:
    """Operands without values: large ones take no memory."""

    device = torch.device("cpu")

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=dtype).as_subclass(DeviceTensor)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype).as_subclass(DeviceTensor)

    def permutation(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.arange(count, dtype=dtype).as_subclass(DeviceTensor)


class LaunchRecorder:
    """From its making on, every launch in this process compiles for an H200 and is noted instead."""

    def __init__(self) -> None:
        self._launches: list[Recorded] = []
        dispatch._cpu_backend = lambda: dispatch.KernelBackend.TRITON  # type: ignore[assignment]
        triton.runtime.driver.set_active(HopperDriver())
        original = JITFunction.run
        launches = self._launches

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            began = time.perf_counter()
            binary = original(kernel, *args, grid=grid, warmup=True, **options)
            launches.append(_recorded(kernel, binary, time.perf_counter() - began))
            return binary

        def planned(binary: Any, grid: Any) -> Callable[..., None]:
            return lambda *args: launches.append(_recorded(binary.src.fn, binary, 0.0))

        JITFunction.run = run
        CompiledKernel.__getitem__ = planned

    def take(self) -> list[Recorded]:
        """The launches since the last call, each distinct binary once."""
        taken = list({launch.binary.hash: launch for launch in self._launches}.values())
        self._launches.clear()
        return taken


def _recorded(kernel: Any, binary: Any, seconds: float) -> Recorded:
    constants = {kernel.arg_names[path[0]]: value for path, value in binary.src.constants.items()}
    return Recorded(kernel.fn.__name__, binary, constants, seconds)
