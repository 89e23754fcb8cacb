"""A rolling upgrade: two gateways and their engine of an earlier commit are replaced by this checkout's while streams run.

The engine of the release before ends last, once no gateway uses it: at a drain it may drop the last events of a stream.

Invariant: clients come through what a balancer does and nothing else: a request goes to a gateway whose `/readyz` answered 200,
and to the other one if no connection was made or the response was a 503; a response that has begun is never repeated.
"""

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal
from uuid import uuid4

import httpx
import msgspec
from tests.benchmarks import rolling_tenants
from tests.benchmarks.bodies import earlier_checkout
from tests.benchmarks.checkout import CHECKOUT
from tests.benchmarks.rolling_tenants import RollingTenant
from tests.platform.conftest import build_tokenizer
from tests.platform.free_ports import free_ports

from loraplex.engine.fake_engine import DEFAULT_INFO, FakeScript
from loraplex.platform.bench.client import CompletionRequest, StreamRecord, stream_completion
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.platform.datastores.migrations import newest_revision, upgrade
from loraplex.platform.drills.ledger_drift import LedgerDrift, measure_drift
from loraplex.platform.drills.traffic import RequestOutcome, outcome_of
from loraplex.platform.processes.environment import foreign_environment
from loraplex.tenants.database import Database

BEFORE: Final = "bdc99e6"
"""The release before this one."""
RUN: Final = "from loraplex.platform.cli.main import main; main()"
MODEL: Final = "tiny"
TOKEN_INTERVAL_S: Final = 0.05
START_S: Final = 180.0
STOP_S: Final = 120.0
RETRY_S: Final = 0.1
GIVE_UP_S: Final = 60.0
"""A request that no gateway takes for so long has failed."""
LIMIT_S: Final = 60.0
"""After the upgrade the limit is used up and refuses a request within so long, or the benchmark fails."""
UNLIMITED: Final = 10**12
BOUNDED_TOKENS: Final = 5


@dataclass(frozen=True, slots=True)
class RollingShape:
    """`streams` at once, of `tokens` each; beside them requests of a tenant whose daily limit has `bounded_tokens`."""

    streams: int = 16
    tokens: int = 60
    bounded_tokens: int = 1000
    settle_s: float = 3.0


@dataclass(slots=True)
class Client:
    """The requests of one tenant: alike, and with `outcomes` of all that were sent."""

    tenant: RollingTenant
    tokens: int
    stream: bool
    outcomes: list[RequestOutcome] = field(default_factory=list)

    @property
    def used(self) -> list[int]:
        """The tokens of each complete response."""
        return [each.usage.prompt + each.usage.completion for each in self.outcomes if each.usage is not None]

    @property
    def refused(self) -> int:
        return sum(each.status == 429 for each in self.outcomes)


@dataclass(slots=True)
class Balancer:
    """Knows which gateways are ready, and sends requests to them. `moved` counts those that a gateway did not take,
    `given_up` those that none took in time.
    """

    urls: Sequence[str]
    ready: set[str] = field(default_factory=set)
    moved: int = 0
    given_up: int = 0
    _turn: Iterator[int] = field(default_factory=count)

    async def watch(self) -> None:
        """Ask each gateway twice a second, until cancelled."""
        async with httpx.AsyncClient(timeout=2.0) as client:
            while True:
                await asyncio.gather(*(self._probe(client, url) for url in self.urls))
                await asyncio.sleep(0.5)

    async def _probe(self, client: httpx.AsyncClient, url: str) -> None:
        try:
            is_ready = (await client.get(f"{url}/readyz")).status_code == 200
        except httpx.TransportError:
            is_ready = False
        (self.ready.add if is_ready else self.ready.discard)(url)

    async def send(self, client: Client) -> None:
        """Send a request until a gateway has taken it, for at most `GIVE_UP_S`."""
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            candidates = sorted(self.ready) or list(self.urls)
            url = candidates[next(self._turn) % len(candidates)]
            outcome = await send_once(url, client)
            client.outcomes.append(outcome)
            if outcome.status not in (0, 503):
                return
            if time.monotonic() > deadline:
                self.given_up += 1
                return
            self.moved += 1
            await asyncio.sleep(RETRY_S)


async def send_once(url: str, client: Client) -> RequestOutcome:
    """Send one request to one gateway."""
    request = CompletionRequest(
        model=MODEL,
        prompt="hello world",
        output_len=client.tokens,
        api_key=client.tenant.key,
        request_id=f"rolling-{uuid4().hex}",
        stream=client.stream,
    )
    record, began = StreamRecord(request), time.monotonic()
    await stream_completion(url, request, record)
    return outcome_of(record, began, time.monotonic())


@dataclass(slots=True)
class Installation:
    """The processes of one installation, each from a checkout; all end with `stack`."""

    folder: Path
    stores: EmbeddedServices
    stack: AsyncExitStack

    def socket_of(self, engine: str) -> str:
        return f"ipc://{self.folder}/run/{engine}.sock"

    async def engine(self, checkout: Path, name: str) -> Process:
        """Start an engine, and wait until it takes requests."""
        model = str(self.folder / "model" / MODEL)
        return await self._start(
            checkout, name, "--role", "engine", "--engine", self.socket_of(name), "--model", model
        )

    async def gateway(self, checkout: Path, name: str, port: int, engines: Sequence[str]) -> Process:
        """Start a gateway of `engines`, and wait until it is ready."""
        addresses = [part for each in engines for part in ("--engine", self.socket_of(each))]
        named = ("--served-model-name", MODEL, "--port", str(port))
        return await self._start(checkout, name, "--role", "gateway", *addresses, *named)

    async def _start(self, checkout: Path, name: str, *arguments: str) -> Process:
        environment = foreign_environment() | {
            "PYTHONPATH": str(checkout / ".src"),
            "DATABASE_URL": self.stores.database_url,
            "REDIS_URL": self.stores.redis_url,
            "LORAPLEX_SECRET": "rolling-upgrade-" + "0" * 32,
            "LORAPLEX_CONSOLE": "false",
            # A busy machine lets Valkey wait longer than the default, and then limits would be shares.
            "LORAPLEX_VALKEY_TIMEOUT_S": "1",
            "LORAPLEX_DRAIN_GRACE_S": "2",
            "LORAPLEX_FAKE_ENGINE": str(self.folder / "script.json"),
        }
        log = self.stack.enter_context((self.folder / f"{name}.log").open("ab"))
        data = ("--data-dir", str(self.folder / name))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", RUN, "serve", *data, *arguments),
            env=environment,
            cwd=self.folder,
            stdout=PIPE,
            stderr=log,
        )
        self.stack.push_async_callback(end, process)
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline() if process.stdout is not None else b""
        if not line.startswith(b"Serving"):
            raise BenchFailed(f"{name} did not start: {(self.folder / f'{name}.log').read_text()[-1000:]}")
        return process


async def end(process: Process) -> None:
    """End a process that may have ended before."""
    if process.returncode is None:
        process.kill()
    await process.wait()


async def drained(process: Process) -> float:
    """SIGTERM; returns the seconds until the process has ended by itself. Raises `BenchFailed`."""
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(STOP_S):
        status = await process.wait()
    if status:
        raise BenchFailed(f"a process ended with status {status} at its drain")
    return time.monotonic() - began


async def measure_rolling_upgrade(shape: RollingShape, against: str, show: Callable[[str], None]) -> Report:
    """Upgrade from the commit `against` to this checkout, and report what clients and ledger saw. Raises `BenchFailed`."""
    with earlier_checkout(against) as earlier, TemporaryDirectory(prefix="loraplex-rolling-") as folder:
        return await upgrade_under_load(Path(folder), earlier or CHECKOUT, shape, against, show)


async def upgrade_under_load(
    folder: Path, earlier: Path, shape: RollingShape, against: str, show: Callable[[str], None]
) -> Report:
    """Start everything from `earlier`, replace it part by part, and compare what clients received with the ledger."""
    prepare(folder)
    async with AsyncExitStack() as stack:
        stores = await stack.enter_async_context(EmbeddedServices(folder / "stores"))
        first, second = await create_tenants(earlier, stores.database_url, shape)
        streaming, bounded = Client(first, shape.tokens, True), Client(second, BOUNDED_TOKENS, False)
        installation = Installation(folder, stores, stack)
        ports = free_ports(2)
        balancer = Balancer([f"http://127.0.0.1:{port}" for port in ports])
        show(f"starting {against} with its schema, revision {first.revision}")
        engine = await installation.engine(earlier, "before")
        gateways = [
            await installation.gateway(earlier, f"gateway{each}", port, ("before", "after"))
            for each, port in enumerate(ports)
        ]
        async with loaded(balancer, streaming, bounded, shape):
            await asyncio.sleep(shape.settle_s)
            show(f"migrating to revision {newest_revision()} while {against} serves")
            await asyncio.to_thread(upgrade, stores.database_url)
            show("starting the new engine")
            newer_engine = await installation.engine(CHECKOUT, "after")
            await asyncio.sleep(shape.settle_s)
            for number, port in enumerate(ports):
                name = f"gateway{number}"
                gateways[number] = await replaced(installation, gateways[number], name, port, shape, show)
            show(f"the engine that no gateway uses any more ended in {await drained(engine):.1f} s")
            await asyncio.sleep(shape.settle_s)
            if not await limit_is_reached(bounded, shape.bounded_tokens):
                show(f"the limit was not used up and refused within {LIMIT_S:g} s after the upgrade")
        for process in (*gateways, newer_engine):
            await drained(process)
        report = await report_of(stores.database_url, balancer, streaming, bounded, shape, against)
        for note in report.notes:
            show(note)
        return report


def prepare(folder: Path) -> None:
    """Write the model's tokenizer and the engine's script."""
    model = folder / "model" / MODEL
    model.mkdir(parents=True)
    build_tokenizer().save_pretrained(model)
    info = msgspec.structs.replace(DEFAULT_INFO, vocab_size=400)
    script = FakeScript(info=info, token_interval_s=TOKEN_INTERVAL_S)
    (folder / "script.json").write_bytes(msgspec.json.encode(script))
    (folder / "run").mkdir(mode=0o700)


async def create_tenants(
    checkout: Path, database_url: str, shape: RollingShape
) -> tuple[RollingTenant, RollingTenant]:
    """Migrate the database and create both tenants with the code of `checkout`."""
    path = os.pathsep.join((str(checkout / ".src"), str(CHECKOUT)))
    tenants = ("streaming", str(UNLIMITED), "bounded", str(shape.bounded_tokens))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", rolling_tenants.MODULE, database_url, *tenants),
        env={**os.environ, "PYTHONPATH": path},
        stdout=PIPE,
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise BenchFailed("the tenants could not be created")
    streaming, bounded = msgspec.json.decode(output, type=list[RollingTenant])
    return streaming, bounded


async def replaced(
    installation: Installation,
    old: Process,
    name: str,
    port: int,
    shape: RollingShape,
    show: Callable[[str], None],
) -> Process:
    """Drain a gateway and start this checkout's in its place, on its port and its data directory."""
    show(f"{name} drained in {await drained(old):.1f} s")
    gateway = await installation.gateway(CHECKOUT, name, port, ("after",))
    await asyncio.sleep(shape.settle_s)
    return gateway


async def limit_is_reached(bounded: Client, limit: int) -> bool:
    """Wait until a client has used its limit and was refused, for at most `LIMIT_S`."""
    give_up = time.monotonic() + LIMIT_S
    while not bounded.refused or sum(bounded.used) < allowed_tokens(bounded.used, limit):
        if time.monotonic() > give_up:
            return False
        await asyncio.sleep(RETRY_S)
    return True


def allowed_tokens(used: Sequence[int], limit: int) -> int:
    """What requests of one size can use of a limit; 0 without any."""
    return limit // used[0] * used[0] if used else 0


@asynccontextmanager
async def loaded(
    balancer: Balancer, streaming: Client, bounded: Client, shape: RollingShape
) -> AsyncIterator[None]:
    """Keep the streams running and the limit tested until the block ends; then wait for the last ones."""
    over = asyncio.Event()
    watching = asyncio.create_task(balancer.watch())

    async def stream() -> None:
        while not over.is_set():
            await balancer.send(streaming)

    async def spend() -> None:
        while not over.is_set():
            await balancer.send(bounded)
            await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as clients:
        for _ in range(shape.streams):
            clients.create_task(stream())
        for _ in range(2):
            clients.create_task(spend())
        try:
            yield
        finally:
            over.set()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def report_of(
    database_url: str,
    balancer: Balancer,
    streaming: Client,
    bounded: Client,
    shape: RollingShape,
    against: str,
) -> Report:
    """Compare outcomes, ledger and limit."""
    database = Database(database_url)
    drifts = [
        await measure_drift(database, client.tenant.id, client.outcomes, 30.0)
        for client in (streaming, bounded)
    ]
    await database.close()
    sent = [each for client in (streaming, bounded) for each in client.outcomes]
    failed = [each for each in sent if not each.complete and each.status not in (0, 429, 503)]
    used = sum(bounded.used)
    allowed = allowed_tokens(bounded.used, shape.bounded_tokens)
    figure = {
        "streams": sum(each.complete for each in streaming.outcomes),
        "failed": len(failed) + balancer.given_up,
        "moved": balancer.moved,
        "differences": sum(map(differences, drifts)),
        "limited_tokens": used,
        "allowed_tokens": allowed,
        "refused": bounded.refused,
    }
    report = Report("rolling-upgrade", tuple(figure))
    report.cases.append(Case(f"{against} to this checkout", asdict(shape) | {"against": against}, figure))
    for name in ("failed", "differences"):
        report.ratios.append(Ratio(name, figure[name], 0, "at most"))
    kinds: tuple[Literal["at most"], Literal["at least"]] = ("at most", "at least")
    for kind in kinds:
        report.ratios.append(Ratio("limited tenant: used / allowed", used / max(1, allowed), 1, kind))
    report.ratios.append(Ratio("limited tenant: refused", bounded.refused, 1, "at least"))
    report.notes += [
        f"failed: {each.status} {each.code}, {each.deliveries} deliveries, at {each.started_s:.1f} to {each.ended_s:.1f}"
        for each in failed[:5]
    ]
    return report


def differences(drift: LedgerDrift) -> int:
    """All differences of a comparison in one number; 0 without any."""
    return drift.drift_pico + drift.drift_tokens + drift.missing + drift.duplicated + drift.open
