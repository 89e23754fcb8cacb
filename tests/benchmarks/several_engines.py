"""Placement of one gateway over the engines of one host, against round robin and bounded consistent hashing; two engines against one.

Invariant: each policy is the product's pool but for the choice, and has the same requests in the same order.
"""

import asyncio
import math
import time
from bisect import bisect
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

from tests.platform.engines.managed_engine import Managed

from loraplex.engine.fake_engine import FakeScript
from loraplex.engine.messages import AdapterKey, AdapterRef, EngineRequest, EngineStats, Failed, Finished
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.config import load_settings
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.engines.prefix_index import PromptPrefix
from loraplex.platform.engines.startup import start_engines

COLUMNS: Final = ("hits", "loads", "read_mb", "tokens_per_s")
PRODUCT, ROUND_ROBIN, BOUNDED_HASH = "product", "round robin", "consistent hash, bounded"
SPILL: Final = 1.25
POINTS: Final = 64
"""Of each engine on the ring."""
ADAPTER_BYTES: Final = 1 << 20
TENANTS: Final = 8
"""Of the two engines of a model, each with one request at a time."""
REPORT_EACH: Final = 20
"""Requests between two reports of the engines, as there are in a second of a busy gateway."""


class RoundRobin(EnginePool):
    """Takes the engines in turns."""

    def _choose(
        self,
        namespace: bytes,
        adapter: AdapterKey | None,
        prefixes: Sequence[PromptPrefix],
        tried: Collection[int] = (),
    ) -> int | None:
        self.turn = getattr(self, "turn", -1) + 1
        return self.turn % len(self.engines)


class BoundedHash(EnginePool):
    """Consistent hashing with bounded loads (Mirrokni et al., SODA 2018): the next engine on the ring with room."""

    def _choose(
        self,
        namespace: bytes,
        adapter: AdapterKey | None,
        prefixes: Sequence[PromptPrefix],
        tried: Collection[int] = (),
    ) -> int | None:
        ring = sorted(
            (_point(f"{number}/{each}"), number) for number in self.engines for each in range(POINTS)
        )
        bound = math.ceil(SPILL * (self.open_requests + 1) / len(self.engines))
        start = bisect(ring, (_point(f"{namespace.hex()}{adapter and adapter[1]}"), 0))
        order = [number for _, number in ring[start:] + ring[:start]]
        return next(number for number in order if self.engines[number].open_requests < bound)


POLICIES: Final[dict[str, type[EnginePool]]] = {
    PRODUCT: EnginePool,
    ROUND_ROBIN: RoundRobin,
    BOUNDED_HASH: BoundedHash,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesShape:
    """`slots`: adapters that each engine has room for. Popularity is Zipf with exponent 1; `rows` requests run at once."""

    engines: int = 4
    adapters: int = 200
    slots: int = 40
    requests: int = 4000
    rows: int = 16
    seed: int = 1


async def measure_several_engines(
    shapes: Sequence[EnginesShape], model: str | None, rounds: int, progress: Callable[[str], None]
) -> Report:
    """Compare hits on scripted engines of each shape, and with a model the tokens of two engines with those of one."""
    report = Report("several-engines", COLUMNS)
    for shape in shapes:
        loads = {}
        for name, policy in POLICIES.items():
            progress(f"{name}, {shape.slots} slots in each of {shape.engines} engines")
            loads[name] = await _loads(shape, policy)
            figure = {
                "hits": 1 - loads[name] / shape.requests,
                "loads": loads[name],
                "read_mb": loads[name] * ADAPTER_BYTES / 1e6,
            }
            report.cases.append(Case(f"{name}, {shape.slots} slots", asdict(shape), figure))
        for other in (ROUND_ROBIN, BOUNDED_HASH):
            hits = [shape.requests - loads[name] for name in (PRODUCT, other)]
            report.ratios.append(
                Ratio(f"hits: product / {other}, {shape.slots} slots", hits[0] / hits[1], 1.0)
            )
    if model is not None:
        await _compare_rates(report, model, rounds, progress)
    return report


async def _loads(shape: EnginesShape, policy: type[EnginePool]) -> int:
    """Loads of adapters, after a warm-up of as many requests as are counted."""
    script = FakeScript(adapter_slots=shape.slots, token_interval_s=0.0005, stats=EngineStats(max_running=64))
    engines = [Managed(script) for _ in range(shape.engines)]
    pool, random = policy(engines), Random(shape.seed)
    refs = [_adapter(number) for number in range(shape.adapters)]
    chosen = random.choices(refs, [1 / (rank + 1) for rank in range(shape.adapters)], k=2 * shape.requests)
    requests, before = enumerate(chosen), 0

    async def client() -> None:
        nonlocal before
        for number, adapter in requests:
            if number == shape.requests:
                before = sum([(await engine.stats()).adapter_loads for engine in engines])
            if number % REPORT_EACH == 0:
                for engine in engines:
                    engine.last_stats = await engine.stats()
            await _tokens(pool, _request(str(number), adapter.namespace, [1] * 8, 4, adapter))

    await asyncio.gather(*(client() for _ in range(shape.rows)))
    return sum([(await engine.stats()).adapter_loads for engine in engines]) - before


async def _compare_rates(report: Report, model: str, rounds: int, progress: Callable[[str], None]) -> None:
    """Two engines against one and against round robin, in turns. Each tenant's prompts begin with 512 tokens of its own."""
    rates: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, engines, policy in (
            ("one engine", 1, EnginePool),
            (f"two engines, {PRODUCT}", 2, EnginePool),
            (f"two engines, {ROUND_ROBIN}", 2, RoundRobin),
        ):
            progress(f"{name}: {Path(model).name}")
            rates.setdefault(name, []).append(await _rate(model, engines, policy))
    for name, found in rates.items():
        report.cases.append(
            Case(name, {"rows": TENANTS, "prompt": 544, "rounds": rounds}, {"tokens_per_s": median(found)})
        )
    one, product, turns = (median(found) for found in rates.values())
    report.ratios += [
        Ratio("tokens/s: two engines / one", product / one),
        Ratio(f"tokens/s: two engines, product / {ROUND_ROBIN}", product / turns),
    ]


async def _rate(model: str, engines: int, policy: type[EnginePool]) -> float:
    async with running_engines(model, engines, max_num_seqs=16) as started:
        pool = policy(list(started.engines.values()))
        begun, numbers = time.monotonic(), count()
        counts = await asyncio.gather(*(_conversation(pool, numbers, tenant) for tenant in range(TENANTS)))
        return sum(counts) / (time.monotonic() - begun)


@asynccontextmanager
async def running_engines(model: str, engines: int, max_num_seqs: int) -> AsyncIterator[EnginePool]:
    """Engines of a model on this machine's cores, once all take requests."""
    settings = {"engines": engines, "device": "cpu", "dtype": "bfloat16", "log_level": "error"}
    with TemporaryDirectory(prefix="loraplex-bench-") as folder:
        async with AsyncExitStack() as stack:
            given = load_settings({"data_dir": Path(folder), "max_num_seqs": max_num_seqs, **settings})
            starting = start_engines(given, model, stack, lambda _: None)
            await starting.ready
            while not all(engine.connected for engine in starting.pool.engines.values()):
                await asyncio.sleep(0.1)
            yield starting.pool


async def _conversation(pool: EnginePool, numbers: Iterator[int], tenant: int) -> int:
    """Requests of a tenant one after the other: they share their first 512 tokens, and differ in 32."""
    random = Random(tenant)
    shared, total = [random.randrange(1000, 40_000) for _ in range(512)], 0
    for _ in range(3):
        prompt = [*shared, *(random.randrange(1000, 40_000) for _ in range(32))]
        total += await _tokens(pool, _request(str(next(numbers)), bytes([tenant]) * 32, prompt, 48))
    return total


async def _tokens(pool: EnginePool, request: EngineRequest) -> int:
    async for event in pool.submit(request):
        if isinstance(event, Failed):
            raise BenchFailed(f"a request failed: {event.message}")
        if isinstance(event, Finished):
            return request.sampling.max_tokens
    raise BenchFailed("a request ended without an event")


def _request(
    name: str, namespace: bytes, prompt: list[int], tokens: int, adapter: AdapterRef | None = None
) -> EngineRequest:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(
        request_id=name, namespace=namespace, prompt_token_ids=prompt, sampling=sampling, adapter=adapter
    )


def _adapter(number: int) -> AdapterRef:
    return AdapterRef(namespace=bytes([number % 10]) * 32, digest=f"{number:064}", blob_path="/b")


def _point(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
