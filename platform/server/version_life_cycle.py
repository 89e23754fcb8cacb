"""Puts the life cycle of adapter versions together: processes that validate, the engines that probe, and where files are kept."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID

import structlog

from loraplex.adapters.errors import ValidationUnavailable
from loraplex.adapters.target_modules import adaptable_modules
from loraplex.adapters.validation.result import Verdict
from loraplex.adapters.validation_process import ValidationProcesses
from loraplex.adapters.versions.lifecycle import AdapterKey, VersionLifeCycle
from loraplex.adapters.versions.pending_folders import HeldUploads
from loraplex.adapters.versions.version_job import AdapterStore, LifeCycleLimits, Validation, VersionWork
from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.errors import ModelError
from loraplex.engine.messages import EngineInfo
from loraplex.platform.config import foreign_environment
from loraplex.platform.engines.pool import EnginePool
from loraplex.tenants.database import Database

LOG = structlog.get_logger("loraplex.life_cycle")


class NoValidation:
    """For a model whose configuration this gateway cannot read: what fits it is not known here."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    async def validate(self, tenant_id: UUID, folder: Path) -> Verdict:
        """Raises `ValidationUnavailable`."""
        raise ValidationUnavailable(self._reason)


@asynccontextmanager
async def open_life_cycle(
    database: Database,
    engines: EnginePool,
    store: AdapterStore,
    root: Path,
    namespace_of: Callable[[UUID], bytes],
) -> AsyncIterator[VersionLifeCycle]:
    """At work until left. `root` is that of the local storage, beside which uploads wait."""
    limits = LifeCycleLimits()
    validation = await asyncio.to_thread(_validation, engines.info())
    work = VersionWork(database, validation, engines, store, namespace_of, limits)
    life_cycle = VersionLifeCycle(
        database, work, HeldUploads(root), limits, lambda: refused_by_engines(engines)
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
