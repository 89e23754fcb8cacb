"""The memory that `CudaReplayer` reports for its captures, against a simulated caching allocator."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from loraplex.engine.runner.cuda_graphs.replay import CudaReplayer


class SimulatedMemory:
    """Reserved bytes: unused `cached` ones, and those of graphs. A step takes `step` bytes while it runs."""

    def __init__(self, cached: int, step: int) -> None:
        self.cached, self.step, self.graphs = cached, step, 0
        self.capturing = False

    def reserved(self, device: Any = None) -> int:
        return self.cached + self.graphs

    def empty_cache(self) -> None:
        self.cached = 0

    def run(self) -> None:
        if self.capturing:
            self.graphs += self.step
        else:
            self.cached += self.step

    @contextmanager
    def graph(self, *_: Any, **__: Any) -> Iterator[None]:
        """As `torch.cuda.graph`, which empties the cache first."""
        self.empty_cache()
        self.capturing = True
        yield
        self.capturing = False


class Stream:
    def wait_stream(self, stream: "Stream") -> None: ...

    def synchronize(self) -> None: ...


class Graph:
    def replay(self) -> None: ...


@pytest.mark.parametrize("cached", [0, 50, 5000])
def test_what_captures_hold_is_theirs_alone(monkeypatch: pytest.MonkeyPatch, cached: int) -> None:
    memory = SimulatedMemory(cached, step=100)

    @contextmanager
    def on_stream(_: Stream) -> Iterator[None]:
        yield

    for name, stand_in in {
        "graph_pool_handle": lambda: (0, 0),
        "Stream": lambda device: Stream(),
        "current_stream": lambda device: Stream(),
        "stream": on_stream,
        "CUDAGraph": Graph,
        "graph": memory.graph,
        "memory_reserved": memory.reserved,
        "empty_cache": memory.empty_cache,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    replayer = CudaReplayer(torch.device("cuda"))
    for count in (1, 2):
        replayer.capture(memory.run)
        assert replayer.nbytes == memory.graphs == 100 * count
