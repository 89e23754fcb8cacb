"""Requests that come and go: swaps beside rows, many adapters over a few places, mixed steps, JSON, and the peer.

Invariant: both sides of a ratio run in one process on one set of weights, with the same prompts and lengths.
"""

import time
from collections.abc import Iterator
from statistics import median

import torch
from tests.benchmarks.gpu.engine_rows import (
    AliasedSource,
    EngineOptions,
    Rows,
    adapter_ref,
    begin,
    end,
    output_rate,
    random_prompts,
    release,
    request,
    running_engine,
    serve,
    step_gaps,
    stepped,
    token_seconds,
)
from tests.benchmarks.gpu.model import RandomModel, random_model
from tests.benchmarks.gpu.peft_peer import peft_rates
from tests.benchmarks.gpu.probe import pinned_rate
from tests.benchmarks.gpu.sizes import RANK, ZIPF, Line, Size, line
from tests.benchmarks.kernels.clock import quantile

from loraplex.engine.engine import Engine
from loraplex.engine.lora.residency import AdapterState
from loraplex.engine.messages import AdapterRef
from loraplex.platform.bench.report import BenchFailed
from loraplex.platform.bench.workload import arrival_offsets, pick_adapters

SWAP_LIMIT_S = 60.0
LOOK_S = 0.00005
"""Between two looks at a swap that takes some milliseconds."""


def swaps(size: Size, device: torch.device) -> Iterator[Line]:
    """How long an adapter takes that left the device, and adapters that come while rows run."""
    model, source = _model(size, device)
    steps = 8 * size.steps * size.rounds
    rows = Rows(size.rows[-2], 0, size.context, 2 * steps + size.most_rows)
    refs = [adapter_ref(index) for index in range(16)]
    options = EngineOptions(adapter_bytes=4 * source.nbytes, host_bytes=2 * len(refs) * source.nbytes)
    with running_engine(model, source, rows, options) as engine:
        for ref in refs:
            _swap_seconds(engine, ref)
        # From now on the host's copies are there.
        swap = median(_swap_seconds(engine, ref) for ref in refs)
        begin(engine, rows)
        quiet = quantile(step_gaps(engine, steps), 0.99)
        busy = quantile(step_gaps(engine, steps, refs), 0.99)
        end(engine, rows)
    shape = {"bytes": source.nbytes, "rows": rows.count}
    yield line("swap/ms", swap * 1000, "ms", **shape)
    if device.type == "cuda":
        yield line("swap/share", 100 * source.nbytes / swap / pinned_rate(device, 1), "%", **shape)
    yield line("swap/p99 itl", busy / quiet, "x", **shape)


def _swap_seconds(engine: Engine, ref: AdapterRef) -> float:
    """From asking for an adapter until rows may use it. The copying thread has the interpreter between two looks.

    Raises `BenchFailed`.
    """
    began = time.perf_counter()
    engine.adapters.prefetch(ref)
    while engine.adapters.state(ref) is not AdapterState.RESIDENT:
        if time.perf_counter() - began > SWAP_LIMIT_S:
            raise BenchFailed(f"an adapter did not come within {SWAP_LIMIT_S:g} s")
        time.sleep(LOOK_S)
        engine.adapters.poll()
    return time.perf_counter() - began


def zipf(size: Size, device: torch.device) -> Iterator[Line]:
    """Many registered adapters over a budget of few, against the same traffic on those few."""
    model, source = _model(size, device)
    rows = Rows(size.most_rows, 0, size.tokens, size.tokens)
    options = EngineOptions(adapter_bytes=size.resident * source.nbytes, host_bytes=size.host_bytes)
    rates = {}
    for count in (size.resident, size.registered):
        with running_engine(model, source, rows, options) as engine:
            output_rate(engine, rows, list(range(size.resident)))
            picks = pick_adapters(count, size.requests, "zipf", ZIPF, seed=count)
            rates[count] = output_rate(engine, rows, picks)
    shape = {"registered": size.registered, "resident": size.resident, "zipf": ZIPF}
    yield line("zipf/resident", rates[size.resident], "tokens/s", **shape)
    yield line("zipf/registered", rates[size.registered], "tokens/s", **shape)
    yield line("zipf/rate over resident", rates[size.registered] / rates[size.resident], "x", **shape)


def mixed(size: Size, device: torch.device) -> Iterator[Line]:
    """Prompts that arrive beside decodes, at rising rates until rows queue, over pure decoding of a full batch."""
    model, source = _model(size, device)
    rows = Rows(size.most_rows, 0, size.prompt, size.output)
    shape = {"rows": rows.count, "prompt": size.prompt, "output": size.output}
    with running_engine(model, source, rows, EngineOptions()) as engine:
        begin(engine, rows)
        token_seconds(engine, rows, size.steps)
        decode = rows.count / token_seconds(engine, rows, size.steps)
        end(engine, rows)
        yield line("mixed/decode alone", decode, "tokens/s", **shape)
        best = 0.0
        for share in size.shares:
            rate, is_stable = open_traffic(engine, rows, share * decode / size.output, size.seconds)
            yield line(f"mixed/at {share:g} of decode", rate, "tokens/s", stable=is_stable, **shape)
            if not is_stable:
                break
            best = max(best, rate)
    yield line("mixed/rate over decode", best / decode, "x", **shape)


def open_traffic(engine: Engine, rows: Rows, requests_per_s: float, seconds: float) -> tuple[float, bool]:
    """Tokens per second in the second half of twice `seconds` of Poisson arrivals, and whether all rows had room then."""
    count = max(2, round(2 * seconds * requests_per_s))
    offsets = arrival_offsets(count, requests_per_s, seed=1)
    prompts = random_prompts(engine, count, rows.prompt, seed=2)
    began, added, open_requests, tokens = time.perf_counter(), 0, 0, 0
    outstanding: list[int] = []
    while (now := time.perf_counter() - began) < 2 * seconds:
        while added < count and offsets[added] <= now:
            engine.add(request(f"open {added}", prompts[added], rows.tokens))
            added, open_requests = added + 1, open_requests + 1
        outputs = stepped(engine).outputs
        open_requests -= sum(output.finish_reason is not None for output in outputs)
        if now >= seconds:
            tokens += len(outputs)
            outstanding.append(open_requests)
    for index in range(added):
        engine.abort(f"open {index}")
    while engine.has_unfinished:
        stepped(engine)
    return tokens / seconds, median(outstanding or [open_requests]) <= rows.count


def json_rows(size: Size, device: torch.device) -> Iterator[Line]:
    """Half the rows with schemas and fast-forward, over the same requests of the same lengths without."""
    from tests.benchmarks.gpu.json_grammar import json_masks, json_spec

    model, source = _model(size, device)
    masks, spec = json_masks(size.shape.vocab), json_spec()
    rows = Rows(size.most_rows, 0, size.prompt, size.output)
    with running_engine(model, source, rows, EngineOptions(mask_factory=masks)) as engine:
        prompts = random_prompts(engine, min(size.requests, 4 * rows.count), size.prompt)
        with_schemas = [
            request(f"json {i}", prompt, size.output, grammar=spec if i % 2 else None, ignore_eos=i % 2 == 0)
            for i, prompt in enumerate(prompts)
        ]
        rates, ratios = [], []
        # The first round compiles the schema and captures nothing new: it does not count.
        for _ in range(size.rounds // 2 + 1):
            constrained = serve(engine, with_schemas, rows.count)
            lengths = [constrained.tokens[f"json {i}"] for i in range(len(prompts))]
            free = serve(
                engine,
                [request(f"free {i}", prompt, lengths[i]) for i, prompt in enumerate(prompts)],
                rows.count,
            )
            rates.append(constrained.rate)
            ratios.append(constrained.rate / free.rate)
    shape = {"rows": rows.count, "prompt": size.prompt, "tokens": sum(lengths)}
    yield line("json/rate", median(rates[1:] or rates), "tokens/s", **shape)
    yield line("json/rate over free", median(ratios[1:] or ratios), "x", **shape)


def peft(size: Size, device: torch.device) -> Iterator[Line]:
    """The same rows and adapters in the engine and in `transformers` + PEFT, in the better of its two modes."""
    rows = Rows(size.most_rows, max(size.most_rows // 4, 1), size.tokens, size.tokens // 2 + 1)
    model, source = _model(size, device)
    picks = [row % rows.adapters for row in range(rows.count)]
    with running_engine(
        model, source, rows, EngineOptions(adapter_bytes=(rows.adapters + 1) * source.nbytes)
    ) as engine:
        output_rate(engine, rows, picks)
        own = output_rate(engine, rows, picks * 2)
    del model, engine
    release(device)
    peers = peft_rates(size.shape, rows, RANK, device)
    shape = {"rows": rows.count, "adapters": rows.adapters, "prompt": rows.prompt, "tokens": rows.tokens}
    yield line("peft/ours", own, "tokens/s", **shape)
    for mode, rate in peers.items():
        yield line(f"peft/{mode}", rate, "tokens/s", **shape)
    yield line("peft/rate over peft", own / max(peers.values()), "x", **shape)


def _model(size: Size, device: torch.device) -> tuple[RandomModel, AliasedSource]:
    model = random_model(size.shape, "none", device)
    return model, AliasedSource(model.loaded.config, RANK, model.loaded.dtype)
