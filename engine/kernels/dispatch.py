"""Chooses the backend of a tensor: Triton on CUDA, compiled on a CPU that supports it, the torch reference elsewhere."""

from enum import Enum, auto
from functools import cache

import torch


class KernelBackend(Enum):
    """The backends of an operation; all have one signature and one meaning."""

    REFERENCE = auto()
    COMPILED = auto()
    TRITON = auto()


@cache
def _cpu_backend() -> KernelBackend:
    # Imported here: loading the compiler takes a second that a machine with a GPU need not spend.
    from loraplex.engine.kernels.cpu import numba_bridge

    return KernelBackend.COMPILED if numba_bridge.is_available() else KernelBackend.REFERENCE


def backend_for(tensor: torch.Tensor) -> KernelBackend:
    """Return the backend of a tensor, by its device only, never by a flag in the model."""
    return backend_on(tensor.device)


def backend_on(device: torch.device) -> KernelBackend:
    """Return the backend for the tensors of a device."""
    return KernelBackend.TRITON if device.type == "cuda" else _cpu_backend()
