"""Opens the components of a gateway from its settings: admission, compile checks, value validation, the version lifecycle."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from uuid import UUID, uuid4

import structlog

from loraplex.adapters.errors import ValidationUnavailable
from loraplex.adapters.target_modules import adaptable_modules
from loraplex.adapters.validation.result import ValidationResult
from loraplex.adapters.validation_process import ValidationProcesses
from loraplex.adapters.versions.lifecycle import AdapterKey, VersionLifecycle
from loraplex.adapters.versions.pending_folders import PendingFolders
from loraplex.adapters.versions.version_job import AdapterStore, LifecycleConfig, Validation, VersionJob
from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.errors import ModelError
from loraplex.engine.messages import EngineInfo
from loraplex.grammar.judge.judges import ValidatorPoolConfig, ValueValidators
from loraplex.grammar.trial.messages import SandboxLimits
from loraplex.grammar.trial.trials import CompileCache
from loraplex.grammar.trial.worker import CompileWorkerConfig
from loraplex.platform.config import Settings, foreign_environment
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.inference.dependencies import CompileChecks, RequestAnalysis, ValueValidation
from loraplex.platform.inference.structured_output.compile_cache import (
    CompileCheckRecorder,
    NoCompileChecks,
    RecordedCompileChecks,
)
from loraplex.platform.observability.admission_metrics import AdmissionMetrics
from loraplex.platform.preparation.messages import Setup
from loraplex.platform.preparation.preparer import AnalyzerConfig, RequestAnalyzer
from loraplex.tenants import valkey
from loraplex.tenants.admission.controller import AdmissionConfig, QuotaAdmissionController
from loraplex.tenants.database import Database

# Less processor time than time: a trial that had its share and failed is the grammar's fault, not a busy machine's.
CPU_SHARE: Final = 0.8
QUEUE_TIMEOUT_DEADLINES: Final = 3
MIN_QUEUE_TIMEOUT_S: Final = 30.0


def trial_limits(settings: Settings) -> SandboxLimits:
    """The operator's budget. Who waits has the patience for a trial behind another one."""
    deadline_s = settings.grammar_deadline_s
    return SandboxLimits(
        deadline_s=deadline_s,
        cpu_s=max(1, int(CPU_SHARE * deadline_s)),
        memory_bytes=settings.grammar_memory_bytes,
        queue_timeout_s=max(MIN_QUEUE_TIMEOUT_S, QUEUE_TIMEOUT_DEADLINES * deadline_s),
    )


@asynccontextmanager
async def open_trials(
    settings: Settings, info: EngineInfo, tokenizer_json: str, recorder: CompileCheckRecorder
) -> AsyncIterator[CompileChecks]:
    """Trials for the model an engine serves. Their process starts meanwhile; checks wait for it.

    `tokenizer_json` is the tokenizer as the engine has it too, for models that come without such a file.
    """
    if not info.eos_token_ids:
        yield NoCompileChecks()
        return
    with TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        await asyncio.to_thread(file.write_text, tokenizer_json, "utf-8")
        options = CompileWorkerConfig(
            tokenizer=str(file),
            vocab_size=info.vocab_size,
            end_token_ids=tuple(info.eos_token_ids),
            limits=trial_limits(settings),
            environment=foreign_environment(),
        )
        trials = CompileCache(options)
        await trials.start()
        try:
            yield RecordedCompileChecks(trials, recorder)
        finally:
            await trials.close()


@asynccontextmanager
async def open_preparation(setup: Setup) -> AsyncIterator[RequestAnalysis]:
    """The preparing process of a gateway. It starts meanwhile; who needs it waits for that."""
    preparer = RequestAnalyzer(AnalyzerConfig(setup=setup, environment=foreign_environment()))
    starting = asyncio.create_task(preparer.start())
    try:
        yield preparer
    finally:
        starting.cancel()
        # A start that failed was told to the log.
        await asyncio.gather(starting, return_exceptions=True)
        await preparer.close()


@asynccontextmanager
async def open_judges() -> AsyncIterator[ValueValidation]:
    """Judges of finished values. Their processes start when there is something to judge."""
    judges = ValueValidators(ValidatorPoolConfig(environment=foreign_environment()))
    try:
        yield judges
    finally:
        await judges.close()


LOG = structlog.get_logger("loraplex.life_cycle")


class NoValidation:
    """For a model whose configuration this gateway cannot read: what fits it is not known here."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    async def validate(self, tenant_id: UUID, folder: Path) -> ValidationResult:
        """Raises `ValidationUnavailable`."""
        raise ValidationUnavailable(self._reason)


@asynccontextmanager
async def open_life_cycle(
    database: Database,
    engines: EnginePool,
    store: AdapterStore,
    root: Path,
    namespace_of: Callable[[UUID], bytes],
) -> AsyncIterator[VersionLifecycle]:
    """At work until left. `root` is that of the local storage, beside which uploads wait."""
    limits = LifecycleConfig()
    validation = await asyncio.to_thread(_validation, engines.info())
    work = VersionJob(database, validation, engines, store, namespace_of, limits)
    life_cycle = VersionLifecycle(
        database, work, PendingFolders(root), limits, lambda: refused_by_engines(engines)
    )
    running = asyncio.create_task(life_cycle.run())
    try:
        yield life_cycle
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await life_cycle.close()


def refused_by_engines(engines: EnginePool) -> list[AdapterKey]:
    """The adapters that some engine has quarantined, as far as its last account tells."""
    accounts = (engine.last_stats for engine in engines.engines)
    return [key for stats in accounts if stats is not None for key in stats.quarantined_adapters]


def _validation(info: EngineInfo) -> Validation:
    try:
        model = load_model_config(info.model_path)
    except ModelError as error:
        LOG.warning("no upload can be validated", reason=str(error))
        return NoValidation(f"the base model's configuration cannot be read here: {error}")
    return ValidationProcesses(
        adaptable_modules(model).values(), info.model_digest, environment=foreign_environment()
    )


async def open_admissions(
    settings: Settings,
    redis_url: str,
    database: Database,
    metrics: AdmissionMetrics,
    stack: AsyncExitStack,
) -> QuotaAdmissionController:
    """Closed by `stack`, upkeep first. What requests wait for is given up sooner than what counts all of a tenant anew: by
    admission itself, which can tell a Valkey that hangs from a loop that is late.
    """
    fast = valkey.open_valkey(redis_url)
    stack.push_async_callback(fast.aclose)
    bulk_redis = valkey.open_valkey(redis_url)
    stack.push_async_callback(bulk_redis.aclose)
    times = AdmissionConfig(
        lease_s=settings.admission_lease_s,
        heartbeat_s=settings.admission_heartbeat_s,
        valkey_s=settings.valkey_timeout_s,
    )
    admissions = QuotaAdmissionController(
        database, fast, settings.price, uuid4(), times, bulk_redis=bulk_redis
    )
    stack.push_async_callback(admissions.close)
    metrics.watch(admissions)
    upkeep = asyncio.create_task(admissions.run())
    stack.push_async_callback(_ended, upkeep)
    return admissions


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
