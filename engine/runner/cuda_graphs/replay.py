"""Captures a step once and replays it: CUDA graphs behind an interface that tests implement on a CPU."""

from collections.abc import Callable
from typing import Protocol

import torch


class Replayer(Protocol):
    """Captures steps. All captures share one pool of memory: two captured steps never run at once."""

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record the work of `step` on tensors at fixed addresses; the result repeats it on their current contents.

        `step` must not read a value from the device, and nothing that it allocates may be read outside.
        """
        ...

    @property
    def nbytes(self) -> int:
        """Device memory that the captures take."""
        ...


class CudaReplayer:
    """CUDA graphs in one private pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        # A capture starts by emptying the allocator's cache; empty it now, so that the difference afterwards is the
        # capture's memory.
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        # Kernels are compiled and libraries allocate workspaces on the first run, which is not allowed during a
        # capture.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            step()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads load adapters to the device meanwhile: only this thread's calls must follow the rules of a
        # capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            step()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self.nbytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return graph.replay
