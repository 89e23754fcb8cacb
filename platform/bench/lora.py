"""`bench lora`: the cost of LoRA per decode step inside the engine, mixed rows against base rows.

Invariant: both batches exist at once over one set of weights and step alternately (ABAB), so that drift affects both alike.
"""

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec
import torch

from loraplex.engine.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig
from loraplex.engine.engine import Engine
from loraplex.engine.lora.weights import LoraModule, LoraWeights
from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.engine.model_loading import LoadedModel, load_model
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.processes.child_process import module_command
from loraplex.platform.processes.environment import engine_environment

MODULE = "loraplex.platform.bench.lora"
BLOCK_SIZE = 16
MEMCPY_BYTES = 256 << 20
REPEATS = 5
WARM_STEPS = 8
ADAPTER_WAIT_S = 60.0
REQUIRED_COST = 3.0
NAMESPACE = bytes(32)
COLUMNS = (
    "base_step_ms",
    "mixed_step_ms",
    "mixed_over_base",
    "adapter_bytes",
    "read_write_gb_per_s",
    "copied_gb_per_s",
    "cost_of_reading",
)
Call = Callable[[], object]
Job = TypeVar("Job", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class LoraShape:
    """`rows` of `input_len` prompt tokens over `adapters` distinct adapters of `rank`; `steps` of each batch count."""

    rows: int
    adapters: int
    rank: int = 16
    input_len: int = 60
    steps: int = 64

    @property
    def name(self) -> str:
        return f"{self.rows} rows, {self.adapters} adapters"

    @property
    def num_blocks(self) -> int:
        length = self.input_len + WARM_STEPS + self.steps + BLOCK_SIZE
        return self.rows * (length // BLOCK_SIZE + 1) + self.adapters


class LoraJob(msgspec.Struct, frozen=True):
    """The input of the measuring process."""

    model: str
    dtype: str
    device: str
    shapes: list[LoraShape]


class RandomAdapterSource:
    """An `AdapterSource` of random tensors over all seven projections."""

    def __init__(self, model: LoadedModel, rank: int) -> None:
        self._model = model
        self._rank = rank

    def load(self, adapter: AdapterRef) -> LoraWeights:
        generator = torch.Generator().manual_seed(int(adapter.digest[:8], 16))
        config = self._model.config
        modules = {
            f"layers.{layer}.{name}": self._module(shape, generator)
            for layer in range(config.num_layers)
            for name, shape in config.projection_shapes().items()
        }
        return LoraWeights(digest=adapter.digest, modules=modules)

    def _module(self, shape: tuple[int, int], generator: torch.Generator) -> LoraModule:
        outputs, inputs = shape
        a = torch.randn(self._rank, inputs, generator=generator) * inputs**-0.5
        b = torch.randn(outputs, self._rank, generator=generator) * 0.02
        return LoraModule(a=a.to(self._model.dtype), b=b.to(self._model.dtype))


def measure_lora(model: str, dtype: str, device: str, shapes: list[LoraShape]) -> Report:
    """Measure each shape on one loaded model. Raises `ModelError` or `BenchFailed`."""
    config = EngineConfig(
        model=model,
        dtype=dtype,
        device=device,
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=1024, prefix_caching=False),
    )
    loaded = load_model(config)
    report = Report("lora", COLUMNS)
    for shape in shapes:
        _measure_shape(report, loaded, config, shape)
    report.notes += [
        "copied_gb_per_s counts each byte once, read_write_gb_per_s twice (it was read and written).",
        "cost_of_reading = (mixed - base) / (adapter bytes / read+write bandwidth); the copied rate gives half of it.",
    ]
    return report


def _measure_shape(report: Report, model: LoadedModel, config: EngineConfig, shape: LoraShape) -> None:
    copied = [memcpy_bandwidth(model.device)]
    with open_engine(model, config, shape) as mixed, open_engine(model, config, shape) as base:
        prefill(mixed, shape, shape.adapters)
        prefill(base, shape, 0)
        mixed_times, base_times = time_alternating_steps(mixed, base, shape)
        adapter_bytes = mixed.stats().adapter_bytes
    copied.append(memcpy_bandwidth(model.device))
    rate = median(copied)
    extra = median(mixed_times) - median(base_times)
    strict, generous = extra * 2 * rate / adapter_bytes, extra * rate / adapter_bytes
    figure = {
        "base_step_ms": median(base_times) * 1000,
        "mixed_step_ms": median(mixed_times) * 1000,
        "mixed_over_base": median(mixed_times) / median(base_times),
        "adapter_bytes": adapter_bytes,
        "copied_gb_per_s": rate / 1e9,
        "read_write_gb_per_s": 2 * rate / 1e9,
        "cost_of_reading": strict,
    }
    facts = {"dtype": str(model.dtype).removeprefix("torch."), "threads": torch.get_num_threads()}
    report.cases.append(Case(shape.name, dataclasses.asdict(shape) | facts, figure))
    report.ratios += [
        Ratio(f"{shape.name}: (mixed - base) / (bytes / read+write rate)", strict, REQUIRED_COST, "at most"),
        Ratio(f"{shape.name}: (mixed - base) / (bytes / copied rate)", generous, REQUIRED_COST, "at most"),
        Ratio(f"{shape.name}: mixed step / base step", median(mixed_times) / median(base_times)),
    ]


@contextmanager
def open_engine(model: LoadedModel, config: EngineConfig, shape: LoraShape) -> Iterator[Engine]:
    """An engine with capacity for the rows of the shape; they are aborted at the end."""
    own = dataclasses.replace(
        config,
        scheduler=SchedulerConfig(max_num_seqs=shape.rows, max_num_batched_tokens=max(256, shape.rows)),
        lora=LoraConfig(max_bytes=8 << 30),
    )
    engine = Engine(
        dataclasses.replace(model, num_blocks=shape.num_blocks), own, RandomAdapterSource(model, shape.rank)
    )
    try:
        yield engine
    finally:
        for row in range(shape.rows):
            engine.abort(str(row))
        engine.close()


def prefill(engine: Engine, shape: LoraShape, adapters: int) -> None:
    """Make every adapter resident, then bring every row to its first token. Raises `BenchFailed`."""
    for index in range(adapters):
        engine.add(_request(f"load {index}", [index], 1, adapter_ref(index)))
    _await_first_tokens(engine, adapters)
    generator = torch.Generator().manual_seed(shape.rows)
    vocabulary = engine.model.config.vocab_size
    for row in range(shape.rows):
        prompt = torch.randint(vocabulary, (shape.input_len,), generator=generator).tolist()
        adapter = adapter_ref(row % adapters) if adapters else None
        # Rows that start first decode while the others prefill, so the limit must not end them early.
        engine.add(_request(str(row), prompt, shape.steps + WARM_STEPS + BLOCK_SIZE, adapter))
    _await_first_tokens(engine, shape.rows)


def _await_first_tokens(engine: Engine, count: int) -> None:
    begun, deadline = 0, time.monotonic() + ADAPTER_WAIT_S
    while begun < count:
        result = engine.step()
        if result.failures:
            raise BenchFailed(str(result.failures[0][1]))
        begun += sum(output.first for output in result.outputs)
        if not result.ran:
            time.sleep(0.002)
        if time.monotonic() > deadline:
            raise BenchFailed(f"{begun} of {count} rows began within {ADAPTER_WAIT_S:g} s")


def _request(request_id: str, prompt: list[int], tokens: int, adapter: AdapterRef | None) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        namespace=NAMESPACE,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        adapter=adapter,
    )


def adapter_ref(index: int) -> AdapterRef:
    """An adapter of `RandomAdapterSource`."""
    return AdapterRef(namespace=NAMESPACE, digest=f"{index + 1:08x}" * 8, blob_path="")


def time_alternating_steps(
    first: Engine, second: Engine, shape: LoraShape
) -> tuple[list[float], list[float]]:
    """Step both engines alternately (ABAB) and return the seconds of each counted step. Raises `BenchFailed`."""
    times: tuple[list[float], list[float]] = ([], [])
    for step in range(WARM_STEPS + shape.steps):
        for engine, taken in zip((first, second), times, strict=True):
            began = time.perf_counter()
            outputs = engine.step().outputs
            if len(outputs) != shape.rows:
                raise BenchFailed(f"a step gave {len(outputs)} tokens instead of {shape.rows}")
            if step >= WARM_STEPS:
                taken.append(time.perf_counter() - began)
    return times


def memcpy_bandwidth(device: torch.device, num_bytes: int | None = None) -> float:
    """Bytes per second of one large copy on the device, each byte counted once; the median of `REPEATS` copies."""
    size = num_bytes or MEMCPY_BYTES
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return size / median_seconds(lambda: target.copy_(source), device)


def median_seconds(work: Call, device: torch.device) -> float:
    """Median seconds of `REPEATS` calls after one warm-up; the device is synchronized around each."""
    taken = []
    for _ in range(REPEATS + 1):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def synchronize(device: torch.device) -> None:
    """Wait until all work launched on the device is complete."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_in_subprocess(module: str, job: msgspec.Struct, folder: Path | None = None) -> Report:
    """Run `module` as a process in the environment of engines: threads bound to cores, huge pages.

    `folder` is imported from, besides installed packages. The module reads `job` from standard input and writes its report
    as its last line. Raises `BenchFailed` with the last line of the child's standard error.
    """
    child = subprocess.run(
        module_command(module),
        input=msgspec.json.encode(job),
        capture_output=True,
        env=engine_environment() | ({} if folder is None else {"PYTHONPATH": str(folder)}),
        check=False,
    )
    if child.returncode != 0:
        said = child.stderr.decode(errors="replace").strip().splitlines()
        raise BenchFailed(said[-1] if said else f"the measuring process ended with {child.returncode}")
    return msgspec.json.decode(child.stdout.splitlines()[-1], type=Report)


def report_job(kind: type[Job], measure: Callable[[Job], Report]) -> None:
    """Read a job from standard input, write its report as one line: the part of `run_in_subprocess` in the child."""
    report = measure(msgspec.json.decode(sys.stdin.buffer.read(), type=kind))
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")


def main() -> None:
    """Measure the job of standard input."""
    report_job(LoraJob, lambda job: measure_lora(job.model, job.dtype, job.device, job.shapes))


if __name__ == "__main__":
    main()
