"""Times of calls: a graph of many over rotated operands on CUDA, one after another on a CPU.

Invariant: between two uses of one set of operands more bytes pass than any cache holds, if there are sets enough.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loraplex.platform.bench.lora import Call, median_seconds

MIN_NODES = 32
REPLAYS = 20
CPU_SECONDS = 0.5
"""On a CPU calls repeat for this long, and at least `MIN_CALLS` times."""
MIN_CALLS = 3
COLD_BYTES = 512 << 20
MAX_SETS = 64
WARM_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of one call."""

    p10: float
    p50: float
    p90: float
    samples: int


def sets_of(num_bytes: int, total: int = COLD_BYTES) -> int:
    """Sets of operands of `num_bytes` that together hold `total`, within reason."""
    return max(1, min(MAX_SETS, -(-total // max(num_bytes, 1))))


def time_calls(calls: Sequence[Call], device: torch.device) -> Times:
    """Each call has operands of its own; they take turns."""
    return _graph_times(calls, device) if device.type == "cuda" else _loop_times(calls)


def _loop_times(calls: Sequence[Call]) -> Times:
    for call in calls:
        call()
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < MIN_CALLS or time.perf_counter() - began < CPU_SECONDS:
        before = time.perf_counter()
        calls[len(taken) % len(calls)]()
        taken.append(time.perf_counter() - before)
    return _times(taken, 1)


def _graph_times(calls: Sequence[Call], device: torch.device) -> Times:
    nodes = max(MIN_NODES, len(calls))
    graph = capture([calls[i % len(calls)] for i in range(nodes)])
    warm_clock(device)
    return _times([replay_seconds(graph) for _ in range(REPLAYS)], nodes)


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """One graph of the calls in this order. Each distinct one runs once before, so that nothing is compiled inside."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in dict.fromkeys(calls):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """One replay on an idle device, by its own events."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    before.record()
    graph.replay()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1000


def warm_clock(device: torch.device) -> None:
    """Products until the device has left its idle clock."""
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_SECONDS:
        for _ in range(8):
            matrix @ matrix
        torch.cuda.synchronize(device)


def product_rate(device: torch.device, side: int) -> float:
    """Operations per second of a square bfloat16 product of random values: zeros would run faster."""
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * float(side) ** 3 / median_seconds(lambda: a @ b, device)


def _times(seconds: Sequence[float], calls: int) -> Times:
    p10, p50, p90 = (_quantile(seconds, share) * 1e6 / calls for share in (0.1, 0.5, 0.9))
    return Times(p10, p50, p90, len(seconds))


def _quantile(values: Sequence[float], share: float) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))
