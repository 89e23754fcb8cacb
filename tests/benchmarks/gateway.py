"""What a request costs the gateway from its HTTP head to its settlement, in this checkout and in an earlier commit of it.

Invariant: both commits serve all the while, each in a process and with stores of its own, and are measured in short turns: a shared
machine is faster and slower from second to second. They get the same requests, which a scripted engine answers.
Client and stores share the machine's cores, but do not count as CPU time of the gateway.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any, Final
from uuid import UUID

import httpx
import msgspec
import uvicorn
from tests.benchmarks.admission import opened_stores
from tests.benchmarks.bodies import earlier_checkout
from tests.benchmarks.checkout import CHECKOUT
from tests.tenants.registry_records import AliasWriter, RegistryWriter

from loraplex.adapters.limits import UploadConfig
from loraplex.engine.fake_engine import FakeEngine
from loraplex.platform.bench.latency_metrics import percentile
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.processes.logs import configure_logs
from loraplex.platform.web.app import create_app
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.models import Quota
from loraplex.tenants.scopes import INFERENCE

MODULE: Final = "tests.benchmarks.gateway"
BASE, ADAPTER = "base", "pirate"
MODELS: Final = {"base model": BASE, "adapter by its alias": ADAPTER}
LIMITS: Final = {
    "requests_per_minute": 100_000_000,
    "tokens_per_minute": 100_000_000,
    "tokens_per_day": 10**12,
}
WARM_UP: Final = 200
TIMEOUT_S: Final = 60.0
AT_MOST: Final = 1.05
COLUMNS: Final = ("cpu_ms", "p50_ms", "p99_ms")


@dataclass(frozen=True, slots=True)
class GatewayShape:
    """`requests` per model in each of `rounds`, over `connections` that each send the next one after a response."""

    requests: int = 2000
    connections: int = 8
    rounds: int = 3


class Serving(msgspec.Struct):
    """Where a gateway serves, and the key of its tenant."""

    pid: int
    port: int
    key: str


Figures = dict[str, float]


def measure_gateway(shape: GatewayShape, against: str | None) -> Report:
    """Measure this checkout, and in turn with it the commit `against`. Raises `BenchFailed`."""
    with earlier_checkout(against) as earlier, ExitStack() as running:
        checkouts = {"": CHECKOUT} if earlier is None else {"before_": earlier, "": CHECKOUT}
        gateways = {prefix: running.enter_context(served(each)) for prefix, each in checkouts.items()}
        figures = {name: measure_in_turn(gateways, model, shape) for name, model in MODELS.items()}
    report = Report("gateway", (*(f"before_{each}" for each in COLUMNS if earlier), *COLUMNS))
    for name, figure in figures.items():
        if earlier is not None:
            ratio = figure["cpu_ms"] / figure["before_cpu_ms"]
            report.ratios.append(Ratio(f"{name}: CPU time after / before", ratio, AT_MOST, "at most"))
        report.cases.append(Case(name, asdict(shape) | {"against": against}, figure))
    return report


def measure_in_turn(gateways: Mapping[str, Serving], model: str, shape: GatewayShape) -> Figures:
    """Measure every gateway in each round, the last of a round first in the next: its CPU time on average, and medians of latency."""
    runs: dict[str, list[Figures]] = {prefix: [] for prefix in gateways}
    order = list(gateways)
    for turn in range(shape.rounds):
        for prefix in order:
            warm_up = 0 if turn else WARM_UP
            runs[prefix].append(asyncio.run(measure(gateways[prefix], model, shape, warm_up)))
        order.reverse()
    return {
        f"{prefix}{column}": (mean if column == "cpu_ms" else median)(run[column] for run in found)
        for prefix, found in runs.items()
        for column in COLUMNS
    }


@contextmanager
def served(checkout: Path, module: str = MODULE, *arguments: str) -> Iterator[Serving]:
    """Run the checkout's own module of this name, or another one, as its gateway: names of modules differ from commit to commit.

    Raises `BenchFailed` when it does not start.
    """
    environment = {**os.environ, "PYTHONPATH": str(checkout / ".src")}
    with subprocess.Popen(
        (sys.executable, "-m", module, *arguments),
        cwd=checkout,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as gateway:
        line = gateway.stdout.readline() if gateway.stdout is not None else b""
        if not line:
            raise BenchFailed(f"the gateway of {checkout} did not start")
        try:
            yield msgspec.json.decode(line, type=Serving)
        finally:
            stop(gateway)


def stop(gateway: "subprocess.Popen[bytes]") -> None:
    """Let a gateway end, and end it if it does not within `TIMEOUT_S`."""
    if gateway.stdin is not None:
        gateway.stdin.close()
    try:
        gateway.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        gateway.kill()


async def measure(serving: Serving, model: str, shape: GatewayShape, warm_up: int = WARM_UP) -> Figures:
    """Send the requests for one model, after `warm_up` that do not count."""
    if warm_up:
        await send(serving, model, warm_up, shape.connections)
    before_s = cpu_seconds(serving.pid)
    waits = await send(serving, model, shape.requests, shape.connections)
    cpu_s = cpu_seconds(serving.pid) - before_s
    p50, p99 = (1000 * percentile(waits, share) for share in (50, 99))
    return {"cpu_ms": 1000 * cpu_s / shape.requests, "p50_ms": p50, "p99_ms": p99}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def send(serving: Serving, model: str, count: int, connections: int) -> list[float]:
    """Send `count` requests; return the seconds to each whole response."""
    body = {"model": model, "prompt": [3, 4, 5, 6], "max_tokens": 4}
    headers = {"authorization": f"Bearer {serving.key}"}
    waits, left = list[float](), iter(range(count))
    url = f"http://127.0.0.1:{serving.port}"
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S) as client:

        async def one() -> None:
            for _ in left:
                began = time.perf_counter()
                response = await client.post("/v1/completions", json=body)
                while response.status_code == 503 and time.perf_counter() < began + TIMEOUT_S:
                    # The stores of a busy machine may not answer in time; the wait counts.
                    await asyncio.sleep(0.1)
                    response = await client.post("/v1/completions", json=body)
                if response.status_code != 200:
                    raise BenchFailed(f"the gateway answered {response.status_code}: {response.text[:200]}")
                waits.append(time.perf_counter() - began)

        await asyncio.gather(*(one() for _ in range(connections)))
    return waits


async def serve(observers: Sequence[Any] = ()) -> None:
    """Serve until standard input ends. `observers` see every request when it has ended."""
    async with opened_stores() as (database, admissions):
        key = await create_tenant(database)
        async with listening(database, admissions, observers) as port:
            sys.stdout.buffer.write(msgspec.json.encode(Serving(os.getpid(), port, key)) + b"\n")
            sys.stdout.buffer.flush()
            await asyncio.to_thread(sys.stdin.read)


async def create_tenant(database: Database) -> str:
    """Create a tenant with limits and an adapter in production; return the text of its key."""
    async with database.as_operator() as session:
        tenant = await TenantRepository(session).create("bench")
        issued = await KeyRepository(session).create(tenant.id, "bench", [INFERENCE])
        session.add(Quota(tenant_id=tenant.id, **LIMITS))
        adapters = RegistryWriter(session, tenant.id)
        await adapters.get_or_create(ADAPTER)
        version = await adapters.add_version(
            ADAPTER, digest="a" * 64, size_bytes=1, rank=8, config={}, report={}
        )
        await AliasWriter(session, tenant.id).set(ADAPTER, "production", {version.version: 100})
    return issued.plaintext


@asynccontextmanager
async def listening(
    database: Database, admissions: QuotaAdmissionController, observers: Sequence[Any] = ()
) -> AsyncIterator[int]:
    """Serve the app on a free port."""
    # An earlier commit knows no observers.
    observed = {"observers": observers} if observers else {}
    app = create_app(dependencies_of(database, admissions), **observed)
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", access_log=False, ws="none")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port: int = server.servers[0].sockets[0].getsockname()[1]
    yield port
    server.should_exit = True
    await serving


def dependencies_of(database: Database, admissions: QuotaAdmissionController) -> GatewayDependencies:
    """Build what a gateway's routes use, with a scripted engine. What requests for plain text of token ids never use is absent."""
    absent: Any = SimpleNamespace(
        special_tokens=frozenset(),
        thought_markers=None,
        continuation_ids=lambda text: [],
        record=lambda stats: None,
        record_adapter=lambda digest, name: None,
    )
    uploads: Any = SimpleNamespace(limits=UploadConfig())
    uploads.in_turns = lambda turns: uploads
    names = (
        *("prompts", "token_text", "recorder", "request_analysis", "compile_checks"),
        *("value_validation", "suite_checks", "lifecycle"),
    )
    known = GatewayDependencies.__dataclass_fields__
    return GatewayDependencies(
        served_model_name=BASE,
        database=database,
        engine=FakeEngine(),
        admission_controller=admissions,
        policy_publisher=admissions,
        namespace_of=lambda tenant_id: tenant_id.bytes * 2,
        derive_key=lambda *parts: bytes(32),
        uploads=uploads,
        adapter_path=adapter_path,
        **{name: absent for name in names if name in known},
    )


async def adapter_path(tenant_id: UUID, digest: str) -> str:
    return f"/{tenant_id}/{digest}"


if __name__ == "__main__":
    # Standard output is a pipe that is read for one line; without this, warnings would fill it and stop the gateway.
    configure_logs("error")
    asyncio.run(serve())
