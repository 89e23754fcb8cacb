"""Opens the components of a gateway from its settings: admission, compile checks, value validation, the version lifecycle."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID, uuid4

import structlog

from loraplex.adapters.errors import ValidationUnavailable
from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.target_modules import BaseModel, adaptable_modules, max_weights_bytes
from loraplex.adapters.validation.result import ValidationResult
from loraplex.adapters.versions.lifecycle import VersionLifecycle
from loraplex.adapters.versions.pending_folders import PendingFolders
from loraplex.adapters.versions.version_job import LifecycleConfig, Validation, VersionJob
from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.errors import ModelError
from loraplex.engine.messages import AdapterKey, EngineInfo
from loraplex.platform.config import Settings
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.inference.structured_output.build_task import AnalysisSetup
from loraplex.platform.inference.structured_output.compile_cache import (
    CompileCache,
    CompileLimits,
    compile_check_task,
)
from loraplex.platform.inference.structured_output.compile_checks import (
    CompileCheckRecorder,
    CompileChecks,
    NoCompileChecks,
    RecordedCompileChecks,
)
from loraplex.platform.inference.structured_output.request_analysis import (
    RequestAnalysis,
    request_analysis_task,
)
from loraplex.platform.observability.admission_metrics import AdmissionMetrics
from loraplex.platform.processes.environment import foreign_environment
from loraplex.platform.server.adapter_validation import AdapterValidation
from loraplex.platform.server.base_model_file import model_names
from loraplex.platform.server.start import running
from loraplex.platform.workers.pool import WorkerPool
from loraplex.platform.workers.task import TaskSpec
from loraplex.tenants import valkey
from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.admission.recovery import ship_left_behind
from loraplex.tenants.billing.price_book import PriceBook
from loraplex.tenants.database import Database
from loraplex.tenants.errors import StoreUnavailable
from loraplex.tenants.ledger.journal.folder import JOURNAL_FOLDER
from loraplex.tenants.ledger.journal.journal import Journal
from loraplex.tenants.registry.versions import serving_by_fingerprint


@asynccontextmanager
async def open_compile_checks(
    pool: WorkerPool,
    info: EngineInfo,
    tokenizer_json: str,
    recorder: CompileCheckRecorder,
    engine_ready: Callable[[], Awaitable[object]],
) -> AsyncIterator[CompileChecks]:
    """Open compile checks for the engine's model. Their process starts in the background; checks wait for it.

    It needs seconds of a core, so it starts after `engine_ready`, or with the first check.
    `tokenizer_json` is the tokenizer of the engine, because some models have no such file.
    """
    if not info.eos_token_ids:
        yield NoCompileChecks()
        return
    with TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        await asyncio.to_thread(file.write_text, tokenizer_json, "utf-8")
        limits, end_token_ids = CompileLimits(), tuple(info.eos_token_ids)
        task = compile_check_task(limits, str(file), info.vocab_size, end_token_ids, foreign_environment())
        async with running(_start_after(engine_ready, pool, task)):
            yield RecordedCompileChecks(CompileCache(pool, task, limits), recorder)


@asynccontextmanager
async def open_request_analysis(pool: WorkerPool, setup: AnalysisSetup) -> AsyncIterator[RequestAnalysis]:
    """Open the request analysis of a gateway. Its process starts in the background; requests that need it wait for it."""
    task = request_analysis_task(setup, foreign_environment())
    async with running(pool.start(task)):  # a failed start has been logged
        yield RequestAnalysis(pool, task)


async def _start_after(ready: Callable[[], Awaitable[object]], pool: WorkerPool, task: TaskSpec[Any]) -> None:
    await ready()
    await pool.start(task)


LOG = structlog.get_logger("loraplex.lifecycle")


class NoValidation:
    """Validation for a model whose configuration this gateway cannot read: no adapter can be checked against it."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    async def validate(self, tenant_id: UUID, folder: Path) -> ValidationResult:
        """Raises `ValidationUnavailable`."""
        raise ValidationUnavailable(self._reason)


async def report_other_fingerprints(database: Database, system_fingerprint: str | None) -> None:
    """Log how many serving versions were validated under each fingerprint but this one: they are served, unprobed since."""
    try:
        async with database.as_operator() as session:
            counts = await serving_by_fingerprint(session)
    except StoreUnavailable as error:
        LOG.warning("the fingerprints of validated adapters are not known", reason=str(error))
        return
    for other, count in sorted(counts.items()):
        if other != system_fingerprint:
            LOG.warning(
                "adapters were validated under another fingerprint",
                adapter_versions=count,
                validated_under=other,
                system_fingerprint=system_fingerprint,
            )


@asynccontextmanager
async def open_lifecycle(
    database: Database,
    engines: EnginePool,
    store: BlobStore,
    root: Path,
    namespace_of: Callable[[UUID], bytes],
    pool: WorkerPool,
    served_name: str,
) -> AsyncIterator[VersionLifecycle]:
    """Run the version lifecycle until the context ends. `root` is the local storage; pending uploads are next to it."""
    config = LifecycleConfig()
    validation = await asyncio.to_thread(_validation, engines.info(), pool, served_name)
    job = VersionJob(database, validation, engines, store, namespace_of, config)
    lifecycle = VersionLifecycle(
        database, job, PendingFolders(root), config, lambda: refused_by_engines(engines)
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(lifecycle.close)
        await stack.enter_async_context(running(lifecycle.run()))
        yield lifecycle


def refused_by_engines(engines: EnginePool) -> list[AdapterKey]:
    """List the adapters that some engine has quarantined, by its newest statistics."""
    snapshots = (engine.last_stats for engine in engines.observed().values())
    return [key for stats in snapshots if stats is not None for key in stats.quarantined_adapters]


def adapter_limits(info: EngineInfo) -> AdapterLimits:
    """Bounds of one uploaded adapter: no file may be larger than that of the largest adapter of the engine's model."""
    limits = AdapterLimits()
    try:
        modules = adaptable_modules(load_model_config(info.model_path)).values()
    except ModelError:
        # Nothing can be validated then, as `_validation` reports.
        return limits
    largest = max_weights_bytes(modules, limits.max_rank, limits.max_header_bytes)
    return replace(limits, max_weights_bytes=min(limits.max_weights_bytes, largest))


def _validation(info: EngineInfo, pool: WorkerPool, served_name: str) -> Validation:
    try:
        model = load_model_config(info.model_path)
    except ModelError as error:
        LOG.warning("no upload can be validated", reason=str(error))
        return NoValidation(f"the base model's configuration cannot be read here: {error}")
    names = model_names(served_name, info.model_path)
    return AdapterValidation(
        pool, BaseModel(adaptable_modules(model), info.model_digest, info.vocabulary_sha256, names)
    )


async def open_admission_control(
    settings: Settings,
    redis_url: str,
    database: Database,
    prices: PriceBook,
    metrics: AdmissionMetrics,
    stack: AsyncExitStack,
) -> QuotaAdmissionController:
    """Ship the journals that were left behind, then open admission control; `stack` closes it, its background tasks first.

    Requests and counter rebuilds have a Valkey client each, since a rebuild may take longer. The timeouts are those of
    admission itself, which can distinguish a Valkey that hangs from an event loop that is late.
    """
    fast = valkey.open_valkey(redis_url)
    stack.push_async_callback(fast.aclose)
    for_rebuilds = valkey.open_valkey(redis_url)
    stack.push_async_callback(for_rebuilds.aclose)
    folder, max_bytes = settings.data_dir / JOURNAL_FOLDER, settings.journal_max_bytes
    config = AdmissionConfig(valkey_s=settings.valkey_timeout_s)
    tenants = await ship_left_behind(
        database, folder, max_bytes=max_bytes, lease_s=config.lease_s, recorder=metrics.journal
    )
    gateway_id = uuid4()
    journal = await Journal.open(folder, gateway_id, max_bytes=max_bytes, recorder=metrics.journal)
    stack.push_async_callback(journal.close)
    controller = QuotaAdmissionController(
        database,
        fast,
        prices,
        gateway_id,
        config,
        journal=journal,
        bulk_redis=for_rebuilds,
        recorder=metrics,
    )
    controller.rebuild_later(tenants)
    stack.push_async_callback(controller.close)
    metrics.watch(controller)
    metrics.journal.watch(journal)
    await stack.enter_async_context(running(controller.maintenance.run()))
    return controller
