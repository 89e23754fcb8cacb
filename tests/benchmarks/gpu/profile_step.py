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
    release,
    running_engine,
    token_seconds,
)
from tests.benchmarks.gpu.model import random_model
from tests.benchmarks.gpu.sizes import RANK, Line, Size, line
from tests.benchmarks.kernels.clock import synchronize
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from loraplex.engine.engine import Engine

TRACED_STEPS = 4
MOST_KERNELS = 12


def profile_steps(size: Size, device: torch.device, out: Path) -> Iterator[Line]:
    """Full batches of the base model and of distinct adapters, bf16 and int4."""
    for scheme in ("none", "int4"):
        model = random_model(size.shape, scheme, device)
        source = AliasedSource(model.loaded.config, RANK, model.loaded.dtype)
        most = size.most_rows
        for adapters in (0, most):
            rows = Rows(most, adapters, size.context, 64 * size.steps + most)
            nbytes = (adapters + 2) * source.nbytes if adapters else 0
            with running_engine(model, source, rows, EngineOptions(adapter_bytes=nbytes)) as engine:
                begin(engine, rows)
                token_seconds(engine, rows, size.steps)
                name = f"{scheme}, {adapters} adapters"
                yield from _profiled(engine, name, device, out / f"trace-{scheme}-{adapters}.json.gz")
                end(engine, rows)
        del model, engine
        release(device)


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
    profiler.export_chrome_trace(str(trace))
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


def _kernels(profiler: Any, kind: DeviceType) -> tuple[Counter[str], Counter[str]]:
    """Microseconds and launches by name, of the events of that device."""
    taken: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == kind:
            taken[event.name] += event.time_range.elapsed_us()
            counts[event.name] += 1
    return taken, counts
