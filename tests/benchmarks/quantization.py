"""Decode steps and prompts of a quantized base model against the unquantized one, inside the engine.

Invariant: both models are in memory at once and run alternately (ABAB), so that drift affects both alike.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from statistics import median

import msgspec
from tests.benchmarks.checkout import CHECKOUT

from loraplex.engine.config import CacheConfig, EngineConfig
from loraplex.engine.engine import Engine
from loraplex.engine.messages import EngineRequest
from loraplex.engine.model_loading import LoadedModel, load_model
from loraplex.engine.quantization.scheme import NONE
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.bench.lora import (
    BLOCK_SIZE,
    NAMESPACE,
    LoraShape,
    open_engine,
    prefill,
    run_in_subprocess,
    time_alternating_steps,
)
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report

MODULE = "tests.benchmarks.quantization"
COLUMNS = ("base_ms", "quantized_ms", "base_over_quantized", "base_weight_mib", "quantized_weight_mib")
REQUIRED = {1: 1.3, 16: 1.0}
"""Required speed-up of a decode step in int8 on a CPU, by rows."""
PROMPT_TOKENS = 256
PROMPTS = 8


class QuantizationJob(msgspec.Struct, frozen=True):
    """The input of the measuring process."""

    model: str
    dtype: str
    device: str
    schemes: list[str]
    rows: list[int]
    steps: int


def measure_quantization(
    model: str, dtype: str, device: str, schemes: Sequence[str], rows: Sequence[int], steps: int
) -> Report:
    """Measure each scheme at each row count, and prompts of 256 tokens. Raises `ModelError` or `BenchFailed`."""
    config = EngineConfig(
        model=model,
        dtype=dtype,
        device=device,
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=1024, prefix_caching=False),
    )
    base = load_model(config)
    report = Report("quantization", COLUMNS)
    for scheme in schemes:
        if scheme == NONE:
            raise BenchFailed("none is what the others are compared with")
        quantized = load_model(dataclasses.replace(config, quantization=scheme))
        for count in rows:
            _measure_decode(report, config, base, quantized, scheme, LoraShape(count, 0, steps=steps))
        _measure_prompts(report, config, base, quantized, scheme)
    return report


def _measure_decode(
    report: Report,
    config: EngineConfig,
    base: LoadedModel,
    quantized: LoadedModel,
    scheme: str,
    shape: LoraShape,
) -> None:
    with open_engine(quantized, config, shape) as ours, open_engine(base, config, shape) as theirs:
        for engine in (ours, theirs):
            prefill(engine, shape, 0)
        times = time_alternating_steps(ours, theirs, shape)
    is_demanded = scheme == "int8" and base.device.type == "cpu"
    required = REQUIRED.get(shape.rows) if is_demanded else None
    facts = {"scheme": scheme, "rows": shape.rows, "input_len": shape.input_len, "steps": shape.steps}
    _add(report, f"{scheme}, decode of {shape.rows}", facts, base, quantized, times, required)


def _measure_prompts(
    report: Report, config: EngineConfig, base: LoadedModel, quantized: LoadedModel, scheme: str
) -> None:
    shape = LoraShape(PROMPTS + 1, 0, input_len=PROMPT_TOKENS)
    times: tuple[list[float], list[float]] = ([], [])
    with open_engine(quantized, config, shape) as ours, open_engine(base, config, shape) as theirs:
        for index in range(PROMPTS + 1):
            for engine, taken in zip((ours, theirs), times, strict=True):
                taken.append(_prompt_seconds(engine, index))
    # The first of each is warm-up.
    facts = {"scheme": scheme, "input_len": PROMPT_TOKENS, "prompts": PROMPTS}
    counted = (times[0][1:], times[1][1:])
    _add(report, f"{scheme}, prompt of {PROMPT_TOKENS}", facts, base, quantized, counted, None)


def _prompt_seconds(engine: Engine, index: int) -> float:
    vocabulary = engine.model.config.vocab_size
    prompt = [(index * 7919 + position * 104_729) % vocabulary for position in range(PROMPT_TOKENS)]
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    engine.add(
        EngineRequest(
            request_id=f"prompt {index}", namespace=NAMESPACE, prompt_token_ids=prompt, sampling=sampling
        )
    )
    began = time.perf_counter()
    while engine.has_unfinished:
        result = engine.step()
        if result.failures:
            raise BenchFailed(str(result.failures[0][1]))
    return time.perf_counter() - began


def _add(
    report: Report,
    name: str,
    facts: dict[str, object],
    base: LoadedModel,
    quantized: LoadedModel,
    times: tuple[list[float], list[float]],
    required: float | None,
) -> None:
    ours, theirs = (median(taken) for taken in times)
    figure = {
        "base_ms": theirs * 1000,
        "quantized_ms": ours * 1000,
        "base_over_quantized": theirs / ours,
        "base_weight_mib": base.weights_bytes / 2**20,
        "quantized_weight_mib": quantized.weights_bytes / 2**20,
    }
    report.cases.append(Case(name, facts | {"dtype": str(base.dtype).removeprefix("torch.")}, figure))
    report.ratios.append(Ratio(f"{name}: unquantized / quantized", theirs / ours, required))


def measure_in_subprocess(job: QuantizationJob) -> Report:
    """Run the job in a child process. Raises `BenchFailed`."""
    return run_in_subprocess(MODULE, job, CHECKOUT)


def main() -> None:
    """Read a job from standard input, write its report as one line."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=QuantizationJob)
    report = measure_quantization(job.model, job.dtype, job.device, job.schemes, job.rows, job.steps)
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    main()
