"""Launches Triton kernels by plans: a launch like an earlier one goes to the compiled kernel, without Triton's binder.

Invariant: launches with one plan are those that Triton compiles to one kernel; what it distinguishes is in the plan's key.
"""

from typing import Any

from torch import Tensor
from triton.runtime.jit import JITFunction

_MISALIGNED = 15
"""Triton compiles wide loads for addresses and integers without these bits."""
_INT32 = 1 << 31

Plans = dict[tuple[Any, ...], tuple[Any, Any, tuple[Any, ...]]]
"""Key -> (kernel, compiled kernel, its constants by position)."""

_plans: Plans = {}


def launch_kernel(kernel: Any, grid: tuple[int, ...], *operands: Any, **constants: Any) -> None:
    """Launch `kernel[grid]` with operands by position, and constants and options by name.

    `TypeError` if an operand is passed by name, or a constant is missing or stands among the operands.
    """
    key = (id(kernel), *constants, *constants.values(), *_kinds(operands))
    _launch(_plans, key, kernel, grid, operands, constants)


def launch_fixed(
    plans: Plans,
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Tensor, ...],
    integers: tuple[int, ...],
    constants: dict[str, Any],
) -> None:
    """`launch_kernel` for a caller with plans of its own for this kernel, these integers and constants: half its time."""
    _launch(plans, tuple(_kinds(tensors)), kernel, grid, (*tensors, *integers), constants)


def _launch(
    plans: Plans,
    key: tuple[Any, ...],
    kernel: Any,
    grid: tuple[int, ...],
    operands: tuple[Any, ...],
    constants: dict[str, Any],
) -> None:
    plan = plans.get(key)
    if plan is not None:
        _, compiled, tail = plan
        compiled[(*grid, 1, 1)[:3]](*operands, *tail)
        return
    compiled = kernel[grid](*operands, **constants)
    # The interpreter compiles nothing.
    if isinstance(kernel, JITFunction):
        plans[key] = kernel, compiled, _tail(kernel, len(operands), constants)


def _kinds(operands: tuple[Any, ...]) -> list[object]:
    """What Triton compiles operands for: a tensor's dtype and alignment; an integer's width, divisibility, or 1.

    The first operand's device stands for that of the launch.
    """
    kinds: list[object] = [operands[0].get_device()]
    add = kinds.append
    for operand in operands:
        if isinstance(operand, Tensor):
            add(operand.dtype)
            add(operand.data_ptr() & _MISALIGNED == 0)
        elif type(operand) is int:
            is_wide = not -_INT32 <= operand < _INT32
            add(1 if operand == 1 else 2 * is_wide + 4 * (operand & _MISALIGNED == 0))
        else:
            add(type(operand))
    return kinds


def _tail(kernel: Any, operands: int, constants: dict[str, Any]) -> tuple[Any, ...]:
    """Return the constants in the order of the kernel's arguments, behind its operands."""
    are_constant = [parameter.is_constexpr for parameter in kernel.params]
    names = kernel.arg_names[operands:]
    if any(are_constant[:operands]) or not all(are_constant[operands:]) or not constants.keys() >= {*names}:
        raise TypeError(f"{kernel.__name__}: operands by position, then each constant by name")
    return tuple(constants[name] for name in names)
