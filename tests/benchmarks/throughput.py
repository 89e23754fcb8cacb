"""The highest rate of small requests that one gateway answers without an error, with a scripted engine and real stores.

Invariant: client, gateway, engine, PostgreSQL and Valkey share this machine's cores. Arrivals are a Poisson process, and a
rate counts only if every request got its response.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import linear_regression
from tempfile import TemporaryDirectory
from typing import Final
from urllib.parse import urlsplit

import msgspec
import psutil
from tests.benchmarks.gateway import LIMITS, cpu_seconds
from tests.benchmarks.open_loop_client import OpenLoopClient, OpenLoopResult, encode_request
from tests.platform.conftest import build_tokenizer

from loraplex.engine.fake_engine import DEFAULT_INFO, FakeScript
from loraplex.platform.bench.latency_metrics import percentile
from loraplex.platform.bench.local_server import BASE_MODEL, LocalServer
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.bench.workload import arrival_offsets
from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.platform.processes.gc_tuning import freeze_gc
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.models import Quota
from loraplex.tenants.scopes import INFERENCE

COLUMNS: Final = (
    *("rate", "requests", "errors", "own_p50_ms", "own_p99_ms"),
    *(f"cpu_ms_{each}" for each in ("gateway", "engine", "client", "postgresql", "valkey")),
    *("rss_start_mib", "rss_middle_mib", "rss_end_mib", "rss_slope_mib_per_min"),
)
GOAL_PER_S: Final = 500.0
CONNECTIONS: Final = 256
KEYS: Final = 4
STEP: Final = 1.25
MEASURED_SEED: Final = 99
MIB: Final = 1 << 20
PRICES: Final = {"price_prompt": "100000", "price_cached_prompt": "50000", "price_completion": "400000"}
ROUTES: Final = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
"""Bodies of these routes: one message of a few words, which the gateway renders and tokenizes, or four token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputShape:
    """`seconds` at the highest rate whose p99 of the gateway's own time is below `p99_ms`, or at `rate` where that is given.

    The engine takes `engine_ms` for a request. Rates are tried for `trial_s` each, after `warm_up_s` at a third of the first.
    """

    route: str = "chat"
    rate: float | None = None
    seconds: float = 60.0
    p99_ms: float = 250.0
    engine_ms: float = 5.0
    output_len: int = 4
    first_rate: float = 200.0
    trial_s: float = 10.0
    warm_up_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Load:
    """What became of the requests at one rate."""

    rate: float
    result: OpenLoopResult
    engine_s: float

    def own_ms(self, share: float) -> float:
        """Percentile of the response times less the engine's scripted time: the gateway's, and what client and sockets add."""
        return 1000 * max(0.0, percentile(self.result.latencies, share) - self.engine_s)

    def holds(self, shape: ThroughputShape) -> bool:
        """Whether every request got its response, and in time."""
        return not self.result.errors and self.own_ms(99) <= shape.p99_ms


class RateSearch:
    """Finds the highest rate that holds: a quarter more until one fails, then between the last two, to a fiftieth."""

    def __init__(self, shape: ThroughputShape, send: Callable[[float, float, int], Awaitable[Load]]) -> None:
        """`send`: (rate, seconds, seed) -> what became of the requests."""
        self._shape = shape
        self._send = send
        self._seed = 0

    async def run(self) -> float:
        """Return that rate in requests per second. Raises `BenchFailed` if none holds."""
        low, high = 0.0, self._shape.first_rate
        while await self._holds(high):
            low, high = high, high * STEP
        while high - low > max(1.0, high / 50):
            middle = (low + high) / 2
            if await self._holds(middle):
                low = middle
            else:
                high = middle
        if not low:
            raise BenchFailed("no rate was answered without an error")
        return low

    async def _holds(self, rate: float) -> bool:
        self._seed += 1
        return (await self._send(rate, self._shape.trial_s, self._seed)).holds(self._shape)


async def measure_throughput(shape: ThroughputShape, progress: Callable[[str], None]) -> Report:
    """Search the rate, then measure it. Raises `BenchFailed`."""
    async with _serving(shape) as (server, client, requests):
        bench = _Bench(shape, server, client, requests, progress)
        await bench.send(shape.first_rate / 3, shape.warm_up_s, seed=0)
        freeze_gc()
        return await bench.measure(shape.rate or await RateSearch(shape, bench.send).run())


class _Bench:
    """Loads one server."""

    def __init__(
        self,
        shape: ThroughputShape,
        server: LocalServer,
        client: OpenLoopClient,
        requests: Sequence[bytes],
        progress: Callable[[str], None],
    ) -> None:
        self._shape = shape
        self._server = server
        self._client = client
        self._requests = requests
        self._progress = progress

    async def send(self, rate: float, seconds: float, seed: int) -> Load:
        offsets = arrival_offsets(max(1, round(rate * seconds)), rate, seed)
        result = await self._client.send_at(self._requests, offsets)
        load = Load(rate, result, self._shape.engine_ms / 1000)
        errors = dict(result.errors) or "no error"
        self._progress(
            f"{rate:.0f}/s: {errors}, own time p99 {load.own_ms(99):.1f} ms, sent at most {1000 * result.late_s:.0f} ms late"
        )
        return load

    async def measure(self, rate: float) -> Report:
        """Measure `rate` for the whole time; one that was searched and does not hold is followed by a twentieth less."""
        report = Report("throughput", COLUMNS)
        while True:
            before, sampling = processor_times(self._server.pid), _MemorySampling(self._server.pid)
            load = await self.send(rate, self._shape.seconds, seed=MEASURED_SEED)
            memory = await sampling.end()
            report.cases.append(self._case(load, before, processor_times(self._server.pid), memory))
            if self._shape.rate is not None or load.holds(self._shape):
                break
            rate *= 0.95
        best = report.cases[-1].figure
        report.ratios.append(Ratio("requests per second / goal", best["rate"] / GOAL_PER_S, 1.0))
        report.ratios.append(Ratio("errors", best["errors"], 0.0, "at most"))
        return report

    def _case(
        self, load: Load, before: dict[str, float], after: dict[str, float], memory: list[tuple[float, float]]
    ) -> Case:
        count = len(load.result.latencies) + load.result.errors.total()
        cpu = {f"cpu_ms_{name}": 1000 * (after[name] - before[name]) / count for name in after}
        figure = {
            "rate": load.rate,
            "requests": count,
            "errors": load.result.errors.total(),
            "own_p50_ms": load.own_ms(50),
            "own_p99_ms": load.own_ms(99),
            "late_ms": 1000 * load.result.late_s,
            **cpu,
            **memory_figures(memory),
        }
        return Case(f"{self._shape.route}, {load.rate:.0f}/s", asdict(self._shape), figure)


@asynccontextmanager
async def _serving(shape: ThroughputShape) -> AsyncIterator[tuple[LocalServer, OpenLoopClient, list[bytes]]]:
    """Start a server with embedded stores and a scripted engine, and a client with the requests of one tenant's keys."""
    with TemporaryDirectory(prefix="loraplex-bench-") as name:
        folder = Path(name)
        build_tokenizer().save_pretrained(folder / "model")
        script = FakeScript(
            info=msgspec.structs.replace(DEFAULT_INFO, vocab_size=400),
            start_delay_s=shape.engine_ms / 1000,
            tokens_per_delta=shape.output_len,
        )
        (folder / "script.json").write_bytes(msgspec.json.encode(script))
        settings = {**PRICES, "fake_engine": str(folder / "script.json"), "log_level": "info"}
        server = LocalServer(folder, str(folder / "model"), settings)
        try:
            await server.start()
            address = urlsplit(server.base_url)
            client = OpenLoopClient(address.hostname or "", address.port or 0, CONNECTIONS)
            body = body_of(shape)
            keys = await create_keys(server.data_dir)
            yield server, client, [encode_request(ROUTES[shape.route], key, body) for key in keys]
            client.close()
        finally:
            await server.stop()


def body_of(shape: ThroughputShape) -> bytes:
    """The body of every request."""
    text = "hello world, the system user said"
    prompt = (
        {"messages": [{"role": "user", "content": text}]}
        if shape.route == "chat"
        else {"prompt": [3, 4, 5, 6]}
    )
    return msgspec.json.encode({"model": BASE_MODEL, "max_tokens": shape.output_len, **prompt})


async def create_keys(data_dir: Path) -> list[str]:
    """Create a tenant with limits that are never reached; return the texts of its keys."""
    async with EmbeddedServices(data_dir, transient=True) as services:
        database = Database(services.database_url, pool_size=1)
        async with database.as_operator() as session:
            tenant = await TenantRepository(session).create("bench")
            session.add(Quota(tenant_id=tenant.id, **LIMITS))
            keys = KeyRepository(session)
            issued = [await keys.create(tenant.id, f"bench {number}", [INFERENCE]) for number in range(KEYS)]
        await database.close()
    return [each.plaintext for each in issued]


class _MemorySampling:
    """Reads the resident memory of a process every half second, until `end`."""

    def __init__(self, pid: int) -> None:
        self._samples: list[tuple[float, float]] = []
        self._task = asyncio.create_task(self._run(pid))

    async def end(self) -> list[tuple[float, float]]:
        """Return (seconds, MiB) of every sample."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return self._samples

    async def _run(self, pid: int) -> None:
        process = psutil.Process(pid)
        while True:
            self._samples.append((time.monotonic(), process.memory_info().rss / MIB))
            await asyncio.sleep(0.5)


def memory_figures(samples: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Resident memory at the start, in the middle and at the end, and its slope after the first quarter."""
    steady = samples[len(samples) // 4 :]
    seconds, sizes = zip(*steady, strict=True)
    slope = linear_regression(seconds, sizes).slope if len(steady) > 1 else 0.0
    return {
        "rss_start_mib": samples[0][1],
        "rss_middle_mib": samples[len(samples) // 2][1],
        "rss_end_mib": samples[-1][1],
        "rss_slope_mib_per_min": 60 * slope,
    }


def processor_times(gateway: int) -> dict[str, float]:
    """User and system time until now by part, of the client in this process and of the server's processes."""
    times = dict.fromkeys(("gateway", "engine", "client", "postgresql", "valkey"), 0.0)
    times["client"] = cpu_seconds(os.getpid())
    for pid in (gateway, *(child.pid for child in psutil.Process(gateway).children(recursive=True))):
        part = "gateway" if pid == gateway else _part_of(pid)
        if part is not None:
            times[part] += cpu_seconds(pid)
    return times


def _part_of(pid: int) -> str | None:
    """Which part a child process of the server is; None for its workers, which these requests do not use."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    parts = {b"engines.main": "engine", b"postgres": "postgresql", b"valkey": "valkey"}
    return next((part for name, part in parts.items() if name in command), None)
