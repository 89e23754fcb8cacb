"""Which body serves a tensor: Triton on CUDA, compiled on a CPU that has it, the torch reference elsewhere."""

from enum import Enum, auto
from functools import cache

import torch


class Body(Enum):
    """The bodies of one operation; all have one signature and one meaning."""

    REFERENCE = auto()
    COMPILED = auto()
    TRITON = auto()


@cache
def _cpu_body() -> Body:
    # Imported here: loading the compiler costs a second that a machine with a GPU need not pay.
    from loraplex.engine.kernels.cpu import numba_bridge

    return Body.COMPILED if numba_bridge.is_available() else Body.REFERENCE


def body_for(tensor: torch.Tensor) -> Body:
    """The choice is by the tensor's device, never by a flag in the model."""
    return body_on(tensor.device)


def body_on(device: torch.device) -> Body:
    """Which body serves the tensors of a device."""
    return Body.TRITON if device.type == "cuda" else _cpu_body()
