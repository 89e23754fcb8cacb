"""Times of calls: a graph of many over rotated operands on CUDA, one after another on a CPU.

Invariant: between two uses of one set of operands more bytes pass than any cache holds, if there are sets enough.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

Call = Callable[[], object]
MIN_NODES = 32
REPLAYS = 20
CPU_SECONDS = 0.5
"""On a CPU calls repeat for this long, and at least `MIN_CALLS` times."""
MIN_CALLS = 3
COLD_BYTES = 512 << 20
MAX_SETS = 64
WARM_SECONDS = 0.1
"""Before each case: what ran before has left the idle clock already, unless operands took long to draw."""
COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
"""On CUDA no cache holds a part of it, and the launch is below a hundredth of its time."""
REPEATS = 5


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
    return _event_seconds(graph.replay)


def warm_clock(device: torch.device) -> None:
    """Products until the device has left its idle clock."""
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_SECONDS:
        for _ in range(8):
            matrix @ matrix
        torch.cuda.synchronize(device)


def copy_rate(device: torch.device, num_bytes: int | None = None) -> float:
    """Bytes read and written per second by one large copy on the device: the yardstick of every share."""
    size = num_bytes or COPY_BYTES[device.type]
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), device)


def median_seconds(work: Call, device: torch.device) -> float:
    """Median seconds of `REPEATS` calls after one warm-up: by the device's events on CUDA, by the clock on a CPU."""
    timed = _event_seconds if device.type == "cuda" else _clock_seconds
    return median([timed(work) for _ in range(REPEATS + 1)][1:])


def _event_seconds(work: Call) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    before.record()
    work()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1000


def _clock_seconds(work: Call) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait until all work launched on the device is complete."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def product_rate(device: torch.device, side: int) -> float:
    """Operations per second of a square bfloat16 product of random values: zeros would run faster."""
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * float(side) ** 3 / median_seconds(lambda: a @ b, device)


def _times(seconds: Sequence[float], calls: int) -> Times:
    p10, p50, p90 = (quantile(seconds, share) * 1e6 / calls for share in (0.1, 0.5, 0.9))
    return Times(p10, p50, p90, len(seconds))


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share (0-1) of the values lies, interpolated."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))
