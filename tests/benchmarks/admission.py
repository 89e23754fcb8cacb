"""Latency that admission adds to a request, with a real PostgreSQL and a real Valkey.

Invariant: each case is the same arrivals on the same scripted engine; they differ only in admission and settlement.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from tests.tenants.billing.fixed_prices import fixed_prices

from loraplex.engine.fake_engine import FakeEngine, FakeScript
from loraplex.engine.messages import EngineRequest
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.auth.authenticator import Caller, tenant_caller
from loraplex.platform.bench.latency_metrics import percentile
from loraplex.platform.bench.report import Case, Ratio, Report
from loraplex.platform.bench.workload import arrival_offsets
from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.platform.datastores.migrations import upgrade
from loraplex.platform.inference.admission import (
    InferenceAdmission,
    PendingAdmission,
    RequestContext,
    RequestSizes,
)
from loraplex.platform.inference.background_tasks import BackgroundTasks
from loraplex.platform.inference.engine_streams import EngineStreams
from loraplex.platform.inference.model_resolution import ResolvedModel
from loraplex.platform.observability.request_stats import RequestStats
from loraplex.platform.processes.gc_tuning import freeze_gc
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.api_keys.keys import AuthenticatedKey, KeyRepository
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.database import Database
from loraplex.tenants.ledger.journal.journal import Journal
from loraplex.tenants.models import Quota
from loraplex.tenants.quotas.limits import COUNTED
from loraplex.tenants.quotas.reservation import SettledUsage
from loraplex.tenants.scopes import INFERENCE
from loraplex.tenants.valkey import open_valkey

WITHOUT, UNLIMITED, LIMITED = "without admission", "no limit set", "every limit, at both levels"
MAX_ADDED_P50_MS, MAX_ADDED_P99_MS = 1.5, 5.0
# Never reached, so that every request is answered; a rate's maximum is the lowest.
AMPLE = 100_000_000
BASE = ResolvedModel("base")
PRICE = Price(prompt=100_000, cached_prompt=50_000, completion=400_000)
COLUMNS = (
    "requests",
    *(f"{part}_p{share}_ms" for part in ("first", "admit", "book", "end") for share in (50, 99)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionShape:
    """Arrivals are a Poisson process of `rate` per second, for `seconds` in each of `rounds`; lengths in tokens.

    The engine takes `engine_ms` for a request.
    """

    rate: float = 200.0
    seconds: float = 10.0
    rounds: int = 3
    input_len: int = 200
    output_len: int = 16
    engine_ms: float = 5.0


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Seconds of one request: `first` until its first event may be sent, `end` for the settlement after the last one.

    `admit` and `book` are parts of `first`: before the engine starts, and from the engine's event until the ledger confirms.
    """

    first: float
    admit: float
    book: float
    end: float


class Scenario:
    """Sends the requests of one shape to a scripted engine, with admission or without."""

    def __init__(self, shape: AdmissionShape, admissions: QuotaAdmissionController) -> None:
        self._shape = shape
        self._admissions = admissions
        self._admission = InferenceAdmission(admissions, BackgroundTasks())
        self._engine = FakeEngine(FakeScript(start_delay_s=shape.engine_ms / 1000))
        self._prompt = list(range(shape.input_len))

    async def round(self, key: AuthenticatedKey | None, seed: int) -> list[RequestTiming]:
        """Send every request at its arrival time. `key` None: without admission."""
        count = max(1, round(self._shape.rate * self._shape.seconds))
        began = time.perf_counter()

        async def one(offset: float) -> RequestTiming:
            await asyncio.sleep(max(0.0, began + offset - time.perf_counter()))
            return await self._request(key)

        return await asyncio.gather(*map(one, arrival_offsets(count, self._shape.rate, seed)))

    async def _request(self, key: AuthenticatedKey | None) -> RequestTiming:
        began = time.perf_counter()
        entry = None if key is None else await self._enter(key)
        entered = time.perf_counter()
        shape = self._shape
        stats = RequestStats(
            arrival=began, n=1, max_tokens=shape.output_len, prompt_lengths=[shape.input_len]
        )
        streams = EngineStreams(self._engine, [self._engine_request()], stats)
        await streams.next()
        begun = time.perf_counter()
        admission = None if entry is None else await entry.reservation()
        first = time.perf_counter()
        while await streams.next() is not None:
            continue
        await streams.close()
        answered = time.perf_counter()
        if admission is not None:
            await self._admissions.settle(admission, used(stats))
        return RequestTiming(first - began, entered - began, first - begun, time.perf_counter() - answered)

    async def _enter(self, key: AuthenticatedKey) -> PendingAdmission:
        async def renewed(caller: Caller) -> Caller:
            return caller

        async def is_unchanged() -> bool:
            return True

        call = RequestContext(
            caller=tenant_caller(key, None),
            request_id=uuid4().hex,
            renew_caller=renewed,
            confirm_caller=renewed,
        )
        shape = self._shape
        sizes = RequestSizes(shape.input_len, shape.output_len, 1)
        return await self._admission.admit(call, BASE, sizes, is_unchanged)

    def _engine_request(self) -> EngineRequest:
        return EngineRequest(
            request_id=uuid4().hex,
            namespace=bytes(32),
            prompt_token_ids=self._prompt,
            sampling=SamplingParams(max_tokens=self._shape.output_len),
        )


def used(stats: RequestStats) -> SettledUsage:
    return SettledUsage(
        outcome="completed",
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        completion_tokens=stats.completion_tokens,
    )


async def measure_admission(shape: AdmissionShape, progress: Callable[[str], None]) -> Report:
    """Measure on new stores, with start-up objects excluded from garbage collection as in a gateway."""
    async with opened_stores() as (database, admissions):
        freeze_gc()
        return await measure_on(database, admissions, shape, progress)


async def measure_on(
    database: Database,
    admissions: QuotaAdmissionController,
    shape: AdmissionShape,
    progress: Callable[[str], None],
) -> Report:
    """Measure the three cases in a random order in each round, after a warm-up of each."""
    found: dict[str, list[RequestTiming]] = {WITHOUT: [], UNLIMITED: [], LIMITED: []}
    keys: dict[str, AuthenticatedKey | None] = {
        WITHOUT: None,
        UNLIMITED: await tenant(database, "unlimited", {}),
        LIMITED: await tenant(database, "limited", dict.fromkeys(COUNTED, AMPLE)),
    }
    scenario, order = Scenario(shape, admissions), random.Random(0)
    for name in found:
        await scenario.round(keys[name], seed=0)
    for number in range(1, shape.rounds + 1):
        for name in order.sample(list(found), len(found)):
            timings = await scenario.round(keys[name], seed=number)
            found[name] += timings
            progress(f"round {number}, {name}: {first_ms(timings, 50):.2f} ms to the first token")
    return report_of(shape, found)


@asynccontextmanager
async def opened_stores() -> AsyncIterator[tuple[Database, QuotaAdmissionController]]:
    """Start new stores, with admission as a gateway runs it."""
    with TemporaryDirectory(prefix="loraplex-bench-") as folder:
        async with EmbeddedServices(Path(folder)) as services:
            await asyncio.to_thread(upgrade, services.database_url)
            database, settings = Database(services.database_url), AdmissionConfig()
            fast = open_valkey(services.redis_url)
            bulk_redis = open_valkey(services.redis_url)
            gateway_id = uuid4()
            journal = await Journal.open(Path(folder) / "journal", gateway_id, max_bytes=256 << 20)
            admissions = QuotaAdmissionController(
                database,
                fast,
                fixed_prices(PRICE),
                gateway_id,
                settings,
                journal=journal,
                bulk_redis=bulk_redis,
            )
            upkeep = asyncio.create_task(admissions.maintenance.run())
            try:
                yield database, admissions
            finally:
                upkeep.cancel()
                await asyncio.gather(upkeep, return_exceptions=True)
                await admissions.close()
                await journal.close()
                await fast.aclose()
                await bulk_redis.aclose()
                await database.close()


async def tenant(database: Database, name: str, limits: Mapping[str, int]) -> AuthenticatedKey:
    """Create a tenant and a key with `limits` on both; return the key."""
    async with database.as_operator() as session:
        owner = await TenantRepository(session).create(name)
        issued = await KeyRepository(session).create(owner.id, "bench", [INFERENCE])
        if limits:
            session.add(Quota(tenant_id=owner.id, **limits))
            session.add(Quota(tenant_id=owner.id, api_key_id=issued.record.id, **limits))
    async with database.as_writer() as session:
        found = await KeyRepository(session).find(issued.record.key_id)
    if found is None:
        raise LookupError(f"the key of {name} is not found")
    return found


def report_of(shape: AdmissionShape, found: Mapping[str, Sequence[RequestTiming]]) -> Report:
    report = Report("admission", COLUMNS)
    for name, timings in found.items():
        figure: dict[str, float | int] = {"requests": len(timings)}
        for share in (50, 99):
            figure[f"first_p{share}_ms"] = milliseconds([each.first for each in timings], share)
            figure[f"admit_p{share}_ms"] = milliseconds([each.admit for each in timings], share)
            figure[f"book_p{share}_ms"] = milliseconds([each.book for each in timings], share)
            figure[f"end_p{share}_ms"] = milliseconds([each.end for each in timings], share)
        report.cases.append(Case(name, asdict(shape), figure))
    for share, most in ((50, MAX_ADDED_P50_MS), (99, MAX_ADDED_P99_MS)):
        for name in (LIMITED, UNLIMITED):
            added = first_ms(found[name], share) - first_ms(found[WITHOUT], share)
            report.ratios.append(
                Ratio(f"ms added before the answer at p{share}, {name}", added, most, "at most")
            )
    for share in (50, 99):
        added = milliseconds([each.end for each in found[LIMITED]], share)
        report.ratios.append(Ratio(f"ms of settlement after the last token at p{share}", added))
    report.notes.append(
        "A request is let in, answered by a scripted engine and settled; HTTP and keys are on neither side. Its first event "
        "waits for the journal; PostgreSQL is written meanwhile."
    )
    return report


def first_ms(timings: Sequence[RequestTiming], share: float) -> float:
    return milliseconds([each.first for each in timings], share)


def milliseconds(seconds: Sequence[float], share: float) -> float:
    return percentile(seconds, share) * 1000
