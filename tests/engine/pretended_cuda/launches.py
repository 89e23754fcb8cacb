"""Launches of Triton kernels on the pretended device: interpreted, with every address that they load from or store to.

Invariant: an address is checked before it is used, so that what a GPU would end the context for raises here.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine.pretended_cuda.findings import DeviceError
from tests.engine.pretended_cuda.ordering import Extent
from tests.engine.pretended_cuda.streams import device
from tests.engine.pretended_cuda.tensors import CudaTensor, host_of
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter

from loraplex.engine.kernels.triton import launch_plans

MAX_GRID = 65535
"""Of the second and third dimension."""
COMPILER_OPTIONS = frozenset({"maxnreg"})
"""What only a compiler takes."""


class Memory:
    """The interpreter's memory, which keeps the extents of one launch."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._spans: set[tuple[int, int, bool]] = set()
        self.one_launch = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._note(pointers, mask, np.dtype(dtype).itemsize, is_write=False)
        return self._memory.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        self._note(pointers, mask, values.dtype.itemsize, is_write=True)
        return self._memory.store(pointers, values, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, values: Any, mask: Any, order: Any) -> Any:
        self._note(pointers, mask, values.dtype.itemsize, is_write=True)
        return self._memory.atomic_rmw(operation, pointers, values, mask, order)

    def take(self) -> list[Extent]:
        """The extents since the last call, those that touch as one."""
        spans, self._spans = self._spans, set()
        return [
            Extent(begin, end, is_write)
            for is_write in (False, True)
            for begin, end in _joined(sorted(span[:2] for span in spans if span[2] is is_write))
        ]

    def _note(self, pointers: NDArray[Any], mask: NDArray[Any], size: int, *, is_write: bool) -> None:
        if mask.all():
            used = pointers
        elif mask.any():
            used = pointers[mask.astype(bool)]
        else:
            return
        begin, end = int(used.min()), int(used.max()) + size
        if (begin, end, is_write) not in self._spans:
            device().ordering.require(begin, end)
            self._spans.add((begin, end, is_write))


@contextmanager
def interpreted_launches() -> Iterator[None]:
    """Every launch of the engine goes to the interpreter and into captures."""
    memory = Memory(interpreter._interpreter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_interpreter", memory)

        def launch(
            plans: Any,
            key: Any,
            kernel: Any,
            grid: tuple[int, ...],
            operands: tuple[Any, ...],
            constants: Any,
        ) -> None:
            _launch(memory, kernel, grid, operands, constants)

        patch.setattr(launch_plans, "_launch", launch)
        yield


def _launch(
    memory: Memory, kernel: Any, grid: tuple[int, ...], operands: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    name = kernel.__name__
    if wrong := [
        i for i, o in enumerate(operands) if isinstance(o, Tensor) and not isinstance(o, CudaTensor)
    ]:
        raise DeviceError(f"{name}: operands {wrong} are on the host")
    if any(count > MAX_GRID for count in grid[1:]):
        raise DeviceError(f"{name}: a grid of {grid}")
    host = [host_of(operand) for operand in operands]
    # Inline assembly is the compiler's; the kernels have arithmetic of the same meaning beside it.
    kept = {key: value for key, value in constants.items() if key not in COMPILER_OPTIONS}
    kept |= {"assembly": False} if "assembly" in kept else {}
    state, stream = device(), device().current
    state.findings.launches += 1

    def run() -> None:
        # Triton's interpreter is one for all threads.
        with memory.one_launch:
            memory.take()
            with _disable_current_modes():
                kernel[grid](*host, **kept)
            state.ordering.launched(stream.clock, stream.name, memory.take(), name)

    if state.capturing is None:
        run()
    else:
        # A capture runs nothing.
        state.ordering.launched(stream.clock, stream.name, [], name)
        state.taped(run)


def _joined(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    begin, end = -1, -1
    for first, last in spans:
        if first > end:
            if end > begin:
                yield begin, end
            begin, end = first, last
        end = max(end, last)
    if end > begin:
        yield begin, end
