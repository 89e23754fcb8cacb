"""Which body serves a tensor: Triton on CUDA, compiled on a CPU that has it, the torch reference elsewhere."""

from enum import Enum, auto
from functools import cache

import torch


class KernelBackend(Enum):
    """The bodies of one operation; all have one signature and one meaning."""

    REFERENCE = auto()
    COMPILED = auto()
    TRITON = auto()


@cache
def _cpu_backend() -> KernelBackend:
    # Imported here: loading the compiler costs a second that a machine with a GPU need not pay.
    from loraplex.engine.kernels.cpu import numba_bridge

    return KernelBackend.COMPILED if numba_bridge.is_available() else KernelBackend.REFERENCE


def backend_for(tensor: torch.Tensor) -> KernelBackend:
    """The choice is by the tensor's device, never by a flag in the model."""
    return backend_on(tensor.device)


def backend_on(device: torch.device) -> KernelBackend:
    """Which body serves the tensors of a device."""
    return KernelBackend.TRITON if device.type == "cuda" else _cpu_backend()
