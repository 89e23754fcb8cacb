"""Launches of many kinds, each compared between Triton's binder and a plan; a process of its own, as the driver is replaced.

Invariant: a plan leads to the kernel that the binder chooses, with its arguments in its order.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.benchmarks.kernels.gemm import random_weight
from tests.engine.kernels.launch_recorder import DeviceTensor, UnfilledTensors
from tests.engine.kernels.launch_times import Launched, forget, without_gpu
from torch import Tensor
from triton.runtime.jit import JITFunction

from loraplex.engine.kernels.triton import quantized_linear
from loraplex.engine.kernels.triton.rms_norm import rms_norm
from loraplex.engine.kernels.triton.silu_mul import silu_mul

Call = Callable[[], object]


def on_device(*shape: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """Return a tensor whose address is `offset` elements behind a multiple of 16 bytes."""
    memory = torch.empty(torch.Size(shape).numel() + offset, dtype=dtype)
    return memory[offset:].view(shape).as_subclass(DeviceTensor)


def elementwise() -> Iterator[Call]:
    """Rows, widths that are 1, divisible by 16 or neither, dtypes, addresses, and an absent operand."""
    for rows, width in ((2, 64), (16, 64), (16, 65), (1, 64), (16, 1)):
        gate_up = on_device(rows, 2 * width, dtype=torch.bfloat16)
        yield lambda gate_up=gate_up: silu_mul(gate_up)  # type: ignore[misc]
    for dtype, offset in ((torch.float16, 0), (torch.bfloat16, 1), (torch.float32, 2)):
        gate_up = on_device(16, 128, dtype=dtype, offset=offset)
        yield lambda gate_up=gate_up: silu_mul(gate_up)  # type: ignore[misc]
    x, weight = on_device(4, 64, dtype=torch.bfloat16), on_device(64, dtype=torch.bfloat16)
    for residual in (
        None,
        on_device(4, 64, dtype=torch.bfloat16),
        on_device(4, 64, dtype=torch.bfloat16, offset=1),
    ):
        yield lambda residual=residual: rms_norm(x, residual, weight, 1e-5)  # type: ignore[misc]


def products() -> Iterator[Call]:
    """Shapes, zeros, biases and addresses of one kernel's launches."""
    tensors = UnfilledTensors()
    for name, outputs, rows, offset, has_bias in (
        ("int4", 256, 1, 0, False),
        ("int4", 256, 16, 0, False),
        ("int4", 256, 16, 3, False),
        ("int4", 250, 16, 0, True),
        ("int4 zeros", 256, 16, 0, False),
    ):
        weight = random_weight(tensors, name, outputs, 256, 128)
        x = on_device(rows, 256, dtype=torch.bfloat16, offset=offset)
        y = on_device(rows, outputs, dtype=torch.bfloat16)
        bias = on_device(outputs, dtype=torch.bfloat16) if has_bias else None
        yield lambda x=x, weight=weight, y=y, bias=bias: quantized_linear.quantized_linear(x, weight, y, bias)  # type: ignore[misc]


def launch_of(call: Call, launched: Launched) -> tuple[Any, tuple[Any, ...]]:
    """The one launch of a call."""
    launched.clear()
    call()
    (launch,) = launched
    return launch


def is_same(given: Any, other: Any) -> bool:
    """Outputs are made by each call, so tensors are compared by what a kernel is compiled for."""
    if isinstance(given, Tensor):
        return (given.dtype, given.shape, given.data_ptr() % 16) == (
            other.dtype,
            other.shape,
            other.data_ptr() % 16,
        )
    return type(given) is type(other) and bool(given == other)


def main() -> None:
    """Print how many launches and kernels were compared; an assertion fails otherwise."""
    launched = without_gpu()
    calls = [*elementwise(), *products()]
    bound = []
    for call in calls:
        forget()
        bound.append(launch_of(call, launched))
    forget()
    for call in calls:
        launch_of(call, launched)
    binder = JITFunction.run
    JITFunction.run = None
    for call, (kernel, arguments) in zip(calls, bound, strict=True):
        planned, given = launch_of(call, launched)
        assert planned is kernel, f"{planned.name} instead of {kernel.name}"
        assert len(given) == len(arguments) and all(map(is_same, given, arguments))
    JITFunction.run = binder
    print(len(calls), len({id(kernel) for kernel, _ in bound}))


if __name__ == "__main__":
    main()
