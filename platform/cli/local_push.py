"""`loraplex adapter push` into a data directory: its storage, and validation for when no server runs on it."""

import asyncio
from pathlib import Path
from typing import Final
from uuid import UUID

from loraplex.adapters.push import FolderPush
from loraplex.adapters.target_modules import BaseModel, adaptable_modules
from loraplex.adapters.validation.result import ValidationResult
from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.checkpoints.digest import model_digest
from loraplex.engine.checkpoints.model_files import locate_model
from loraplex.engine.checkpoints.reader import open_checkpoint
from loraplex.engine.checkpoints.vocabulary_digests import vocabulary_digests
from loraplex.platform.cli.command_context import TenantCommand
from loraplex.platform.config import load_settings
from loraplex.platform.datastores.blob_storage import BlobStorage
from loraplex.platform.datastores.installation import require_installation
from loraplex.platform.server.adapter_validation import AdapterValidation
from loraplex.platform.server.base_model_file import (
    BaseModelFacts,
    default_served_name,
    model_names,
    read_base_model,
)
from loraplex.platform.startup_errors import DependencyFailed
from loraplex.platform.workers.pool import WorkerPool

DIGEST_CACHE: Final = "model_digests.json"


class CommandValidation:
    """Validates in a worker process of the command. The model's configuration is read with the folder."""

    def __init__(self, facts: BaseModelFacts) -> None:
        self._facts = facts

    async def validate(self, tenant_id: UUID, folder: Path) -> ValidationResult:
        """Raises `ValidationUnavailable`, `ModelError`."""
        base = await asyncio.to_thread(_base_model, self._facts)
        async with WorkerPool() as pool:
            return await AdapterValidation(pool, base).validate(tenant_id, folder)


def _base_model(facts: BaseModelFacts) -> BaseModel:
    model = load_model_config(facts.path)
    vocabulary = vocabulary_digests(str(locate_model(facts.path)), model, open_checkpoint(facts.path, model))
    names = model_names(facts.served_name, facts.path)
    return BaseModel(adaptable_modules(model), facts.digest, vocabulary, names)


async def local_push(command: TenantCommand, model: str | None) -> FolderPush:
    """Return pushes into the data directory of `command`. `model`: the base model, where no server has run yet.

    Raises `DependencyFailed`, `ModelError`.
    """
    home = command.home
    settings = load_settings({"data_dir": home})
    require_installation(settings, files=True)
    facts = read_base_model(home) if model is None else await asyncio.to_thread(_facts_of, model, home)
    return FolderPush(
        command.database,
        lambda _: command.unit_of_work(),
        BlobStorage(settings, facts.digest).adapters,
        CommandValidation(facts),
        base_model=facts.served_name,
        storage_floor_bytes=settings.storage_floor_bytes,
    )


def data_dir_blobs(home: Path) -> BlobStorage:
    """Return the storage of a data directory, for everything but fetching adapters from a bucket. Raises `DependencyFailed`."""
    settings = load_settings({"data_dir": home})
    require_installation(settings, files=True)
    return BlobStorage(settings, "")


def _facts_of(model: str, home: Path) -> BaseModelFacts:
    digest = model_digest(model, home / DIGEST_CACHE)
    return BaseModelFacts(served_name=_served_name(model, home), path=model, digest=digest)


def _served_name(model: str, home: Path) -> str:
    """The served name of this data directory's server, or the one that it would use."""
    try:
        return read_base_model(home).served_name
    except DependencyFailed:
        return load_settings({"data_dir": home}).served_model_name or default_served_name(model)
