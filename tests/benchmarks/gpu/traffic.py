"""Requests that come and go: swaps beside rows, many adapters over a few places, mixed steps, JSON, and the peer.

Invariant: both sides of a ratio run in one process on one set of weights, with the same prompts and lengths.

Every job has 6 s until CUDA answers, 1 for weights in bfloat16, 2 for four adapters on the host, 3 for an engine's start and its
captures: estimates for an H100, made before any run. What each adds stands with it.
"""

import time
from collections.abc import Iterator, Sequence
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
from tests.benchmarks.gpu.sizes import RANK, ZIPF, Line, Size, left_out, line
from tests.benchmarks.gpu.time_left import TimeLeft
from tests.benchmarks.kernels.clock import quantile

from loraplex.engine.engine import Engine
from loraplex.engine.lora.residency import AdapterState
from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.platform.bench.report import BenchFailed
from loraplex.platform.bench.workload import arrival_offsets, pick_adapters

SWAP_LIMIT_S = 60.0
LOOK_S = 0.00005
"""Between two looks at a swap that takes some milliseconds."""
PEER_S = 25.0
"""Estimate of the peer's import, model, adapters and first mode."""
JSON_REQUESTS = 2
"""Requests of each row and kind, one after another."""


def swaps(size: Size, device: torch.device, left: TimeLeft) -> Iterator[Line]:
    """How long an adapter takes that left the device, and adapters that come while rows run.

    Of 35 s pinning takes 1, 16 loads 2, prompts 1, and each of ten stretches of steps 1.
    """
    model, source = _model(size, device)
    steps = 8 * size.steps
    rows = Rows(size.rows[-2], 0, size.context, 2 * steps * size.rounds + size.most_rows)
    refs = [adapter_ref(index) for index in range(16)]
    options = EngineOptions(adapter_bytes=4 * source.nbytes, host_bytes=2 * len(refs) * source.nbytes)
    with running_engine(model, source, rows, options) as engine:
        for ref in refs:
            _swap_seconds(engine, ref)
        # From now on the host's copies are there.
        swap = median(_swap_seconds(engine, ref) for ref in refs)
        shape = {"bytes": source.nbytes, "rows": rows.count}
        yield line("swap/ms", swap * 1000, "ms", **shape)
        if device.type == "cuda":
            yield line("swap/share", 100 * source.nbytes / swap / pinned_rate(device, 1), "%", **shape)
        begin(engine, rows)
        quiet: list[float] = []
        busy: list[float] = []
        for _ in left.rounds(size.rounds):
            quiet += step_gaps(engine, steps)
            busy += step_gaps(engine, steps, refs)
        end(engine, rows)
    worse = quantile(busy, 0.99) / quantile(quiet, 0.99)
    yield line("swap/p99 itl", worse, "x", **shape, steps=len(busy))


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


def zipf(size: Size, device: torch.device, left: TimeLeft) -> Iterator[Line]:
    """Many registered adapters over a budget of few, against the same traffic on those few; twice, since the first time most
    come from the source, which takes a core 0.1 s each, and the second time from host memory.

    Pinning takes 4 to 8 s, 64 loads 7, traffic on the resident ones 4, over all 10 and then 5: 45 of 60 s.
    """
    model, source = _model(size, device)
    rows = Rows(size.most_rows, 0, size.tokens, size.tokens)
    options = EngineOptions(adapter_bytes=size.resident * source.nbytes, host_bytes=size.host_bytes)
    shape = {"registered": size.registered, "resident": size.resident, "zipf": ZIPF}
    picks = {
        count: pick_adapters(count, size.requests, "zipf", ZIPF, seed=count)
        for count in (size.resident, size.registered)
    }
    with running_engine(model, source, rows, options) as engine:
        output_rate(engine, rows, list(range(size.resident)))
        resident = output_rate(engine, rows, picks[size.resident])
        yield line("zipf/resident", resident, "tokens/s", **shape)
        adapters = engine.adapters
        for number in left.rounds(2):
            loads, hits = adapters.num_loads, adapters.host.num_hits
            registered = output_rate(engine, rows, picks[size.registered])
            from_host = adapters.host.num_hits - hits
            came = {"from_host": from_host, "from_source": adapters.num_loads - loads - from_host}
            name = ("cold", "warm")[number]
            yield line(f"zipf/registered, {name}", registered, "tokens/s", **shape, **came)
    yield line("zipf/rate over resident", registered / resident, "x", **shape, **came, run=name)


def mixed(size: Size, device: torch.device, left: TimeLeft) -> Iterator[Line]:
    """Prompts that arrive beside decodes, over pure decoding of a full batch: the highest rate at which no rows queue.

    By halving: four rates of twice 4 s, and what they leave open is run to its end in 1 to 2 s. Of 70 s 15 go before.
    """
    model, source = _model(size, device)
    rows = Rows(size.most_rows, 0, size.prompt, size.output)
    shape = {"rows": rows.count, "prompt": size.prompt, "output": size.output}
    with running_engine(model, source, rows, EngineOptions()) as engine:
        begin(engine, rows)
        token_seconds(engine, rows, size.steps)
        decode = rows.count / token_seconds(engine, rows, size.steps)
        end(engine, rows)
        yield line("mixed/decode alone", decode, "tokens/s", **shape)
        stable: list[float] = [0.0]
        low, high = 0, len(size.shares)
        while low < high and left.fits(3 * size.seconds):
            middle = (low + high) // 2
            share = size.shares[middle]
            rate, is_stable = open_traffic(engine, rows, share * decode / size.output, size.seconds)
            yield line(f"mixed/at {share:g} of decode", rate, "tokens/s", stable=is_stable, **shape)
            low, high = (middle + 1, high) if is_stable else (low, middle)
            stable += [rate] if is_stable else []
    if low < high:
        yield from left_out("mixed/rate over decode")
    else:
        yield line("mixed/rate over decode", max(stable) / decode, "x", **shape)


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


def json_rows(size: Size, device: torch.device, left: TimeLeft) -> Iterator[Line]:
    """Half the rows with schemas and fast-forward, over the same requests of the same lengths without.

    Prompts are short, so that decoding is what is compared: 3 s for either side of a round. The vocabulary takes 2 s of 40.
    """
    from tests.benchmarks.gpu.json_grammar import json_masks, json_spec

    model, source = _model(size, device)
    masks, spec = json_masks(size.shape.vocab), json_spec()
    rows = Rows(size.most_rows, 0, size.tokens, size.output)
    with running_engine(model, source, rows, EngineOptions(mask_factory=masks)) as engine:
        prompts = random_prompts(engine, JSON_REQUESTS * rows.count, rows.prompt)
        # The schema is compiled before anything counts.
        serve(engine, [request("compiled", prompts[0], size.output, grammar=spec, ignore_eos=False)], 1)
        rates: list[tuple[float, float]] = []
        for _ in left.rounds(size.rounds):
            constrained = serve(engine, _json_requests(prompts, size.output, spec), rows.count)
            lengths = [constrained.tokens[f"json {i}"] for i in range(len(prompts))]
            free = [request(f"free {i}", prompt, lengths[i]) for i, prompt in enumerate(prompts)]
            rates.append((constrained.rate, serve(engine, free, rows.count).rate))
    shape = {"rows": rows.count, "prompt": rows.prompt, "tokens": sum(lengths), "rounds": len(rates)}
    yield line("json/rate", median(rate for rate, _ in rates), "tokens/s", **shape)
    yield line("json/rate over free", median(a / b for a, b in rates), "x", **shape)


def _json_requests(prompts: Sequence[list[int]], tokens: int, spec: bytes) -> list[EngineRequest]:
    """Every second one has the schema, and ends where that ends."""
    return [
        request(f"json {i}", prompt, tokens, grammar=spec if i % 2 else None, ignore_eos=i % 2 == 0)
        for i, prompt in enumerate(prompts)
    ]


def peft(size: Size, device: torch.device, left: TimeLeft) -> Iterator[Line]:
    """The same rows and adapters in the engine and in `transformers` + PEFT, in the better of its two modes.

    Ours takes 18 of 60 s with its start; the peer 4 to be imported, 6 for its model and 16 adapters, 5 with an adapter per row,
    10 with one adapter after the other. The memory of ours is given back before.
    """
    rows = Rows(size.most_rows, max(size.most_rows // 4, 1), size.tokens, size.tokens // 4 + 1)
    model, source = _model(size, device)
    picks = [row % rows.adapters for row in range(rows.count)]
    options = EngineOptions(adapter_bytes=(rows.adapters + 1) * source.nbytes)
    with running_engine(model, source, rows, options) as engine:
        output_rate(engine, rows, picks)
        own = output_rate(engine, rows, picks * 2)
    del model, engine
    release(device)
    shape = {"rows": rows.count, "adapters": rows.adapters, "prompt": rows.prompt, "tokens": rows.tokens}
    yield line("peft/ours", own, "tokens/s", **shape)
    if not left.fits(PEER_S):
        yield from left_out("peft/rate over peft")
        return
    best = 0.0
    for mode, rate in peft_rates(size.shape, rows, RANK, device, left):
        best = max(best, rate)
        yield line(f"peft/{mode}", rate, "tokens/s", **shape)
    yield line("peft/rate over peft", own / best, "x", **shape)


def _model(size: Size, device: torch.device) -> tuple[RandomModel, AliasedSource]:
    model = random_model(size.shape, "none", device)
    return model, AliasedSource(model.loaded.config, RANK, model.loaded.dtype)
