"""How a step is captured once and replayed: CUDA graphs behind a seam that a CPU can stand in for."""

from collections.abc import Callable
from typing import Protocol

import torch


class Replayer(Protocol):
    """Captures reuse one pool of memory: two captured steps never run at once."""

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record what `step` does with tensors at fixed addresses; the result does it again with their contents then.

        Nothing in `step` may ask the device for a value, and nothing it allocates may be read outside.
        """
        ...

    @property
    def nbytes(self) -> int:
        """Device memory that the captures hold."""
        ...


class CudaReplayer:
    """CUDA graphs in one private pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        # A capture begins by emptying the allocator's cache: what is in it now would be taken off what it holds after.
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        # Kernels are compiled and libraries make their workspaces on the first run, which no capture survives.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            step()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads bring adapters to the device meanwhile: only this one's calls are held to the rules of a capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            step()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self.nbytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return graph.replay
