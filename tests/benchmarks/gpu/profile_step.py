"""One step under torch's profiler: which kernels take its time, how much of it the device is idle, and a trace to look at."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tests.benchmarks.gpu.engine_rows import (
    AliasedSource,
    EngineOptions,
    Rows,
    begin,
    end,
    running_engine,
    token_seconds,
)
from tests.benchmarks.gpu.model import random_model
from tests.benchmarks.gpu.sizes import RANK, Line, Size, left_out, line
from tests.benchmarks.gpu.time_left import TimeLeft
from tests.benchmarks.kernels.clock import synchronize
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from loraplex.engine.engine import Engine

SCHEME = "int4"
TRACED_STEPS = 4
"""Replayed, they have some thousand kernels: a trace of a few hundred kilobytes, compressed."""
MOST_KERNELS = 12
PROFILE_S = 8.0


def profile_steps(size: Size, device: torch.device, left: TimeLeft, out: Path) -> Iterator[Line]:
    """Full batches of distinct adapters over int4.

    6 of 40 s until CUDA answers, 2 for the weights, 2 for adapters on the host, 4 for the engine, 7 for loads, 3 for prompts, 5
    for the profiler and its trace.
    """
    model = random_model(size.shape, SCHEME, device)
    source = AliasedSource(model.loaded.config, RANK, model.loaded.dtype)
    most = size.most_rows
    rows = Rows(most, most, size.context, 64 * size.steps + most)
    with running_engine(
        model, source, rows, EngineOptions(adapter_bytes=(most + 2) * source.nbytes)
    ) as engine:
        begin(engine, rows)
        token_seconds(engine, rows, size.steps)
        name = f"{SCHEME}, {most} adapters"
        if left.fits(PROFILE_S):
            yield from _profiled(engine, name, device, out / f"trace-{SCHEME}-{most}.json.gz")
        else:
            yield from left_out(f"profile/{name}/step")
        end(engine, rows)


def _profiled(engine: Engine, name: str, device: torch.device, trace: Path) -> Iterator[Line]:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    synchronize(device)
    with profile(activities=activities) as profiler:
        began = time.perf_counter()
        for _ in range(TRACED_STEPS):
            engine.step()
        synchronize(device)
        wall = (time.perf_counter() - began) / TRACED_STEPS
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    taken, counts = _kernels(profiler, kind)
    busy = sum(taken.values()) / TRACED_STEPS
    yield line(f"profile/{name}/step", wall * 1e6, "us, profiled", trace=trace.name)
    yield line(
        f"profile/{name}/kernels",
        busy,
        "us of kernels per step",
        launches=sum(counts.values()) / TRACED_STEPS,
    )
    for kernel, micros in taken.most_common(MOST_KERNELS):
        launches = counts[kernel] / TRACED_STEPS
        yield line(f"profile/{name}/{kernel[:60]}", micros / TRACED_STEPS, "us per step", launches=launches)
    profiler.export_chrome_trace(str(trace))
    yield line(f"profile/{name}/trace", trace.stat().st_size, "bytes", trace=trace.name)


def _kernels(profiler: Any, kind: DeviceType) -> tuple[Counter[str], Counter[str]]:
    """Microseconds and launches by name, of the events of that device."""
    taken: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == kind:
            taken[event.name] += event.time_range.elapsed_us()
            counts[event.name] += 1
    return taken, counts
