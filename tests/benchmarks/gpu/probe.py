"""What the device itself can do: the ceilings and costs that every other figure is read against."""

from collections.abc import Iterator
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from tests.benchmarks.kernels.clock import (
    REPEATS,
    capture,
    copy_rate,
    median_seconds,
    product_rate,
    replay_seconds,
    warm_clock,
)

NODES = 1000
FORKS = 200
ADAPTER_BYTES = 84 << 20
"""An adapter of rank 16 over all projections of an 8B model."""
PIECES = 32
OPERATIONS = ("_scaled_mm", "_weight_int4pack_mm", "_convert_weight_to_int4pack", "_weight_int8pack_mm")


def probe(device: torch.device, *, is_dry: bool) -> Iterator[dict[str, Any]]:
    """Lines of the stage, each as soon as it is known."""
    copy_bytes, read_bytes, side = (4 << 20, 4 << 20, 128) if is_dry else (2 << 30, 4 << 30, 8192)
    if device.type == "cuda":
        warm_clock(device)
    yield _line("copy, read and written", copy_rate(device, copy_bytes) / 1e9, "GB/s")
    yield _line("read", read_rate(device, read_bytes) / 1e9, "GB/s")
    yield _line(f"product of {side}", product_rate(device, side) / 1e12, "TFLOP/s")
    for name in OPERATIONS:
        yield _line(f"torch has {name}", float(hasattr(torch.ops.aten, name)), "yes=1")
    if device.type == "cuda":
        for pieces in (1, PIECES):
            yield _line(f"pinned copy in {pieces}", pinned_rate(device, pieces) / 1e9, "GB/s")
        yield _line("graph node", node_seconds(device, forks=False) * 1e6, "us")
        yield _line("fork and join", node_seconds(device, forks=True) * 1e6, "us")


def _line(variant: str, value: float, unit: str) -> dict[str, Any]:
    return {
        "stage": "probe",
        "op": "probe",
        "variant": variant,
        "case": f"probe/{variant}",
        "ok": True,
        "value": value,
        "unit": unit,
    }


def read_rate(device: torch.device, num_bytes: int) -> float:
    """Bytes per second of a sum."""
    values = torch.randn(num_bytes // 2, dtype=torch.bfloat16, device=device)
    return num_bytes / median_seconds(values.sum, device)


def pinned_rate(device: torch.device, pieces: int) -> float:
    """Bytes per second from pinned memory, in one copy or several of equal size."""
    source = torch.ones(ADAPTER_BYTES, dtype=torch.uint8).pin_memory().chunk(pieces)
    target = torch.empty(ADAPTER_BYTES, dtype=torch.uint8, device=device).chunk(pieces)

    def copy() -> None:
        for into, piece in zip(target, source, strict=True):
            into.copy_(piece, non_blocking=True)

    return ADAPTER_BYTES / median_seconds(copy, device)


def node_seconds(device: torch.device, *, forks: bool) -> float:
    """Of one node that does next to nothing; `forks`: on a branch, beside the same node on the main stream."""
    value, other = (torch.zeros(1, device=device) for _ in range(2))
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def one() -> None:
        main = torch.cuda.current_stream(device)
        if forks:
            side.wait_stream(main)
        with torch.cuda.stream(side) if forks else nullcontext():
            other.add_(1)
        value.add_(1)
        if forks:
            main.wait_stream(side)

    count = FORKS if forks else NODES // 2
    graph = capture([one] * count)
    seconds = median(replay_seconds(graph) for _ in range(REPEATS)) / count
    return seconds if forks else seconds / 2
