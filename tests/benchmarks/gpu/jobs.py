"""What is measured of the whole model: time per output token, swaps, residency, and the peer.

Invariant: both sides of a ratio take turns in one process, on one set of weights.
"""

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from tests.benchmarks.gpu.demands import over_base_case, share_case, tpot_case
from tests.benchmarks.gpu.engine_rows import (
    AliasedSource,
    Rows,
    adapter_ref,
    begin,
    end,
    output_rate,
    running_engine,
    step_gaps,
    token_seconds,
)
from tests.benchmarks.gpu.model import RandomModel, random_model
from tests.benchmarks.gpu.peft_peer import peft_rates
from tests.benchmarks.gpu.probe import pinned_rate
from tests.benchmarks.gpu.worker import Results, device_of
from tests.benchmarks.kernels.shapes import LLAMA_3_8B, TINY, LayerShape

from loraplex.engine.engine import Engine
from loraplex.engine.lora.residency import AdapterState
from loraplex.platform.bench.latency_metrics import percentile
from loraplex.platform.bench.lora import memcpy_bandwidth
from loraplex.platform.bench.workload import pick_adapters

RANK = 16
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything: real, or hardly anything."""

    shape: LayerShape
    context: int
    steps: int
    rounds: int
    rows: tuple[int, ...]
    registered: int
    resident: int
    requests: int
    tokens: int
    copy_bytes: int | None

    @property
    def most_rows(self) -> int:
        return self.rows[-1]


REAL = Size(LLAMA_3_8B, 512, 16, 5, (1, 32, 64), 1000, 64, 512, 64, None)
DRY = Size(TINY, 8, 1, 2, (1, 2), 6, 3, 6, 3, 1 << 20)


@dataclass(frozen=True, slots=True)
class Job:
    """`seconds` estimates it on a GPU, the making of the model included. Not `runs_dry`: one like it does."""

    name: str
    seconds: float
    run: Callable[[Size, torch.device], Iterator[Line]]
    runs_dry: bool = True


def run_model(connection: Connection, is_dry: bool, name: str) -> None:
    """One job in this process."""
    results = Results(connection)
    results.begin(name)
    if is_dry:
        torch.set_num_threads(1)
    job = next(job for job in MODEL_JOBS if job.name == name)
    try:
        for line in job.run(DRY if is_dry else REAL, device_of(is_dry)):
            results.line(line)
    except Exception as error:  # noqa: BLE001 - written down as this job's result
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__} at {last.filename.rpartition('/')[2]}:{last.lineno}: {error}"
        results.line({"stage": "time", "op": "model", "case": name, "ok": False, "error": text[:600]})


def _line(case: str, value: float, unit: str, **shape: Any) -> Line:
    return {
        "stage": "time",
        "op": "model",
        "variant": case.partition("/")[0],
        "shape": shape,
        "case": case,
        "ok": True,
        "value": value,
        "unit": unit,
    }


def _tpot(scheme: str) -> Callable[[Size, torch.device], Iterator[Line]]:
    def run(size: Size, device: torch.device) -> Iterator[Line]:
        turns = _Turns(
            random_model(size.shape, scheme, device), size, 2 * memcpy_bandwidth(device, size.copy_bytes)
        )
        most = size.most_rows
        with turns.engine(0) as off:
            with turns.engine(most + 2) as on:
                for rows in size.rows:
                    yield from turns.measure(off, on, rows, 0, "all-base")
                    yield from turns.measure(off, on, rows, 1, "one")
                yield from turns.measure(off, on, most, most, "distinct")
            with turns.engine(most + 2, "int8") as on:
                yield from turns.measure(off, on, most, most, "distinct 8-bit")

    return run


@dataclass(slots=True)
class _Turns:
    """Engines without and with adapters over one set of weights, stepped in turn (ABAB)."""

    model: RandomModel
    size: Size
    memcpy_bandwidth: float
    source: AliasedSource = field(init=False)

    def __post_init__(self) -> None:
        self.source = AliasedSource(self.model.loaded.config, RANK, self.model.loaded.dtype)

    def rows(self, count: int, adapters: int) -> Rows:
        return Rows(count, adapters, self.size.context, self.size.steps * (self.size.rounds + 2) + count + 64)

    def engine(self, adapters: int, page_dtype: str = "auto") -> AbstractContextManager[Engine]:
        """For as many rows as any load has, with room for `adapters` of them."""
        most = self.rows(self.size.most_rows, 0)
        return running_engine(self.model, self.source, most, adapters * self.source.nbytes, page_dtype)

    def measure(self, off: Engine, on: Engine, count: int, adapters: int, load: str) -> Iterator[Line]:
        """Rows of the base model in `off`, and of `adapters` adapters in `on`."""
        size, base, loaded = self.size, self.rows(count, 0), self.rows(count, adapters)
        begin(off, base)
        begin(on, loaded)
        rounds = [
            (token_seconds(off, base, size.steps), token_seconds(on, loaded, size.steps))
            for _ in range(size.rounds + 1)
        ][1:]
        end(off, base)
        end(on, loaded)
        without, with_them = (median(taken) for taken in zip(*rounds, strict=True))
        shape = {"rows": count, "context": size.context, "adapters": adapters, "rank": RANK}
        scheme, name = self.model.scheme, size.shape.name
        if load == "all-base":
            yield _line(tpot_case(scheme, count, "base", name), without * 1000, "ms", **shape)
            if count == 1:
                streamed = self.model.streamed_bytes
                share = 100 * streamed / without / self.memcpy_bandwidth
                yield _line(share_case(scheme, name), share, "% of copy", streamed_bytes=streamed)
        yield _line(tpot_case(scheme, count, load, name), with_them * 1000, "ms", **shape)
        ratio = median(b / a for a, b in rounds)
        yield _line(over_base_case(scheme, count, load, name), ratio, "x", **shape)


def _swap(size: Size, device: torch.device) -> Iterator[Line]:
    """Adapters that come while rows run, and how long one takes when nothing else does."""
    model = random_model(size.shape, "none", device)
    source = AliasedSource(model.loaded.config, RANK, model.loaded.dtype)
    steps = 8 * size.steps * size.rounds
    rows = Rows(size.rows[-2], 0, size.context, 3 * steps)
    refs = [adapter_ref(index) for index in range(16)]
    with running_engine(model, source, rows, 4 * source.nbytes) as engine:
        taken = []
        for ref in [*refs, *refs]:
            began = time.perf_counter()
            engine.adapters.prefetch(ref)
            while engine.adapters.state(ref) is not AdapterState.RESIDENT:
                engine.adapters.poll()
            taken.append(time.perf_counter() - began)
        # The first time round the host's copies are made.
        swap = median(taken[len(refs) :])
        begin(engine, rows)
        quiet = percentile(step_gaps(engine, steps), 99)
        busy = percentile(step_gaps(engine, steps, refs), 99)
        end(engine, rows)
    shape = {"bytes": source.nbytes, "rows": rows.count}
    yield _line("swap/ms", swap * 1000, "ms", **shape)
    if device.type == "cuda":
        yield _line("swap/share", 100 * source.nbytes / swap / pinned_rate(device, 1), "%", **shape)
    yield _line("swap/p99 itl", busy / quiet, "x", **shape)


def _zipf(size: Size, device: torch.device) -> Iterator[Line]:
    """Many registered adapters over a budget of few, against the same traffic on those few."""
    model = random_model(size.shape, "none", device)
    source = AliasedSource(model.loaded.config, RANK, model.loaded.dtype)
    rows = Rows(size.most_rows, 0, size.tokens, size.tokens)
    rates = {}
    for count in (size.resident, size.registered):
        with running_engine(model, source, rows, size.resident * source.nbytes) as engine:
            output_rate(engine, rows, list(range(size.resident)))
            picks = pick_adapters(count, size.requests, "zipf", 1.1, seed=count)
            rates[count] = output_rate(engine, rows, picks)
    shape = {"registered": size.registered, "resident": size.resident, "zipf": 1.1}
    yield _line("zipf/resident", rates[size.resident], "tokens/s", **shape)
    yield _line("zipf/registered", rates[size.registered], "tokens/s", **shape)
    yield _line("zipf/rate over resident", rates[size.registered] / rates[size.resident], "x", **shape)


def _peft(size: Size, device: torch.device) -> Iterator[Line]:
    """The same rows and adapters in the engine and in `transformers` + PEFT, in the better of its two modes."""
    rows = Rows(size.most_rows, max(size.most_rows // 4, 1), size.tokens, size.tokens // 2 + 1)
    model = random_model(size.shape, "none", device)
    source = AliasedSource(model.loaded.config, RANK, model.loaded.dtype)
    picks = [row % rows.adapters for row in range(rows.count)]
    with running_engine(model, source, rows, rows.adapters * source.nbytes) as engine:
        output_rate(engine, rows, picks)
        own = output_rate(engine, rows, picks * 2)
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()
    peers = peft_rates(size.shape, rows, RANK, device)
    shape = {"rows": rows.count, "adapters": rows.adapters, "prompt": rows.prompt, "tokens": rows.tokens}
    yield _line("peft/ours", own, "tokens/s", **shape)
    for mode, rate in peers.items():
        yield _line(f"peft/{mode}", rate, "tokens/s", **shape)
    yield _line("peft/rate over peft", own / max(peers.values()), "x", **shape)


MODEL_JOBS = (
    Job("tpot none", 100.0, _tpot("none"), runs_dry=False),
    Job("tpot int4", 120.0, _tpot("int4")),
    Job("swap", 40.0, _swap),
    Job("peft", 60.0, _peft),
    Job("zipf", 60.0, _zipf),
    Job("tpot int8", 110.0, _tpot("int8"), runs_dry=False),
)
