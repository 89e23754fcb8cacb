"""Decode steps on a CPU against the time of reading the weights, alone and beside a process that keeps a core busy.

Invariant: steps alone, reads and steps beside the process take turns, so that drift affects all alike.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import msgspec
import torch
from tests.benchmarks.checkout import CHECKOUT

from loraplex.engine.config import CacheConfig, EngineConfig
from loraplex.engine.engine import Engine
from loraplex.engine.messages import EngineStats
from loraplex.engine.model_loading import LoadedModel, load_model
from loraplex.engine.quantization.scheme import NONE
from loraplex.platform.bench.lora import (
    BLOCK_SIZE,
    WARM_STEPS,
    LoraShape,
    median_seconds,
    open_engine,
    prefill,
    run_in_subprocess,
)
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report

MODULE = "tests.benchmarks.decode"
COLUMNS = (
    "step_ms",
    "read_ms",
    "read_gb_per_s",
    "step_over_read",
    "counted_share",
    "busy_step_ms",
    "busy_share",
)
READ_BYTES = 256 << 20
REQUIRED_OVER_READ = 1.5
"""Of one row in bfloat16."""
COUNTED = 0.85, 1.15
"""What `loraplex_step_bytes_total` and `loraplex_memory_rate_bytes` say of a step must agree with what is read here."""
REQUIRED_SHARE = {1: 0.34, 16: 0.43}
"""Rate beside a busy process over the rate alone, by rows."""


class DecodeJob(msgspec.Struct, frozen=True):
    """The input of the measuring process."""

    model: str
    dtype: str
    quantization: list[str]
    rows: list[int]
    steps: int
    repeats: int


def measure_decode(job: DecodeJob) -> Report:
    """Measure each format at each number of rows. Raises `ModelError` or `BenchFailed`."""
    report = Report("decode", COLUMNS)
    for name in job.quantization:
        config = EngineConfig(
            model=job.model,
            dtype=job.dtype,
            device="cpu",
            quantization=name,
            cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=1024, prefix_caching=False),
        )
        model = load_model(config)
        for rows in job.rows:
            # A round has counted steps alone and beside the process, and as many that warm up.
            length = 2 * job.repeats * (WARM_STEPS + job.steps)
            _measure(report, config, model, LoraShape(rows, 0, steps=length), job)
    return report


def _measure(
    report: Report, config: EngineConfig, model: LoadedModel, shape: LoraShape, job: DecodeJob
) -> None:
    numbers = torch.ones(READ_BYTES // 4)
    alone, busy, reads, shares = [], [], [], []
    with open_engine(model, config, shape) as engine:
        prefill(engine, shape, 0)
        for _ in range(job.repeats):
            before = engine.stats()
            alone.append(_step_seconds(engine, shape.rows, job.steps))
            shares.append(_share_of_memory_rate(before, engine.stats()))
            reads.append(median_seconds(numbers.sum, model.device))
            with _busy_process():
                busy.append(_step_seconds(engine, shape.rows, job.steps))
    read_rate = READ_BYTES / median(reads)
    weight_bytes = _streamed_bytes(model, config.quantization)
    read = weight_bytes / read_rate
    step, busy_step = median(alone), median(busy)
    figure = {
        "step_ms": step * 1000,
        "read_ms": read * 1000,
        "read_gb_per_s": read_rate / 1e9,
        "step_over_read": step / read,
        "counted_share": median(shares),
        "busy_step_ms": busy_step * 1000,
        "busy_share": step / busy_step,
    }
    name = f"{model.config.num_layers} layers of {model.config.hidden_size}, {config.quantization}, decode of {shape.rows}"
    facts = {
        "rows": shape.rows,
        "quantization": config.quantization,
        "steps": job.steps,
        "repeats": job.repeats,
    }
    facts |= {"dtype": job.dtype, "threads": torch.get_num_threads(), "weight_bytes": weight_bytes}
    report.cases.append(Case(name, facts, figure))
    is_demanded = shape.rows == 1 and config.quantization == NONE and model.dtype is torch.bfloat16
    over_read = REQUIRED_OVER_READ if is_demanded else None
    counted = f"{name}: share of the memory's rate, as the engine counts it over as this reads it"
    # Both of the best reads, for others' work only slows one down.
    agreement = median(shares) * step * READ_BYTES / min(reads) / weight_bytes
    report.ratios += [
        Ratio(counted, agreement, COUNTED[0]),
        Ratio(counted, agreement, COUNTED[1], "at most"),
        Ratio(f"{name}: step / reading the weights", step / read, over_read, "at most"),
        Ratio(f"{name}: rate beside a busy process", step / busy_step, REQUIRED_SHARE.get(shape.rows)),
    ]


def _share_of_memory_rate(before: EngineStats, after: EngineStats) -> float:
    parts = ("step_weight_bytes", "step_kv_bytes", "step_adapter_bytes")
    num_bytes = sum(getattr(after, part) - getattr(before, part) for part in parts)
    return float(num_bytes / (after.step_seconds - before.step_seconds) / after.memory_rate)


def _streamed_bytes(model: LoadedModel, quantization: str) -> int:
    """Bytes of every weight that a step multiplies by: the embedding table only where it is the head, too."""
    config = model.config
    if config.tie_word_embeddings and quantization == NONE:
        return model.weights_bytes
    return model.weights_bytes - config.vocab_size * config.hidden_size * model.dtype.itemsize


def _step_seconds(engine: Engine, rows: int, steps: int) -> float:
    """Seconds of a step, over `steps` after warm-up: beside another process most steps are undisturbed and a few wait."""
    _run(engine, rows, WARM_STEPS)
    began = time.perf_counter()
    _run(engine, rows, steps)
    return (time.perf_counter() - began) / steps


def _run(engine: Engine, rows: int, steps: int) -> None:
    for _ in range(steps):
        outputs = engine.step().outputs
        if len(outputs) != rows:
            raise BenchFailed(f"a step gave {len(outputs)} tokens instead of {rows}")


@contextmanager
def _busy_process() -> Iterator[None]:
    # Of a session of its own: the kernel shares cores between sessions first, and a server's is another than its users'.
    with subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) as process:
        try:
            yield
        finally:
            process.kill()


def measure_in_subprocess(job: DecodeJob) -> Report:
    """Run the job in a child process. Raises `BenchFailed`."""
    return run_in_subprocess(MODULE, job, CHECKOUT)


def main() -> None:
    """Read a job from standard input, write its report as one line."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=DecodeJob)
    sys.stdout.buffer.write(msgspec.json.encode(measure_decode(job)) + b"\n")


if __name__ == "__main__":
    main()
