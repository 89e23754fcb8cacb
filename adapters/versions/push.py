"""`AdapterRegistry`: validates a local folder of PEFT's two files and registers it as a version of a tenant's
adapter.

Invariant: files are copied into private storage before they are read, so that what was validated is what is stored.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias
from uuid import UUID

from loraplex.adapters.errors import FolderRejected
from loraplex.adapters.limits import DEFAULT_LIMITS, AdapterLimits
from loraplex.adapters.report import ValidationReport
from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.storage.garbage_collection import RemoveBlob, remove_unused
from loraplex.adapters.storage.local_store import CONFIG_FILE, WEIGHTS_FILE, LocalAdapterStore, keep_canonical
from loraplex.adapters.storage.safe_files import copy_regular
from loraplex.adapters.target_modules import adaptable_modules
from loraplex.adapters.validation.result import Validated
from loraplex.adapters.validation.upload_files import PICKLE_FILE, open_upload
from loraplex.adapters.validation.validate import examine
from loraplex.engine.models.config import ModelConfig
from loraplex.tenants.database import Database
from loraplex.tenants.names import check_adapter_name
from loraplex.tenants.registry.adapters import AdapterProfile, AdapterRepository
from loraplex.tenants.registry.aliases import AliasRepository
from loraplex.tenants.registry.deletion import AdapterDeletion, Blob, UnusedBlobs, lock_digest
from loraplex.tenants.registry.resolution import PRODUCTION

Promotion: TypeAlias = Literal["always", "first", "never"]
"""When `production` moves to a pushed version: always, only where the adapter has none before it, or never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedVersion:
    """`promoted`: whether the alias `production` now names this version. `size_bytes` is that of the weights."""

    name: str
    version: int
    digest: str
    size_bytes: int
    rank: int
    promoted: bool
    report: ValidationReport


class AdapterRegistry:
    """`base_model_digest` is part of every adapter's digest: another base model gives another digest."""

    def __init__(
        self,
        database: Database,
        storage: LocalAdapterStore,
        model_config: ModelConfig,
        base_model_digest: str,
        limits: AdapterLimits = DEFAULT_LIMITS,
        blobs: BlobStore | None = None,
        served_model_name: str | None = None,
    ) -> None:
        """`blobs` publishes pushed adapters to other machines, if any. No new adapter may be named
        `served_model_name`.
        """
        self._database = database
        self._storage = storage
        self._blobs = blobs
        self._modules = adaptable_modules(model_config)
        self._base_model_digest = base_model_digest
        self._limits = limits
        self._served_model_name = served_model_name

    async def push(
        self,
        tenant_id: UUID,
        name: str,
        folder: Path,
        *,
        promote: Promotion = "always",
        profile: AdapterProfile | None = None,
    ) -> PushedVersion:
        """Return a new version, or the existing one of equal content (see `add_version` for `profile`).

        Raises `InvalidName` of tenants or `AdapterRejected`; nothing is registered then.
        """
        check_adapter_name(name)
        await self._require_reachable(tenant_id, name)
        stored = await self._keep(tenant_id, folder)
        async with self._database.as_tenant(tenant_id) as session:
            await lock_digest(session, Blob(tenant_id, stored.digest))
            if not self._storage.exists(tenant_id, stored.digest):
                # The last version with the same files was deleted meanwhile; under the lock they stay.
                await self._keep(tenant_id, folder)
            repository = AdapterRepository(session, tenant_id)
            await repository.get_or_create(name)
            first = not await repository.versions(name)
            promoted = promote == "always" or (promote == "first" and first)
            version = await repository.add_version(
                name,
                digest=stored.digest,
                size_bytes=stored.size_bytes,
                rank=stored.rank,
                config=stored.config,
                report={"checks": stored.report.as_dicts()},
                profile=profile,
            )
            if promoted:
                await AliasRepository(session, tenant_id).set(name, PRODUCTION, {version.version: 100})
        return PushedVersion(
            name=name,
            version=version.version,
            digest=stored.digest,
            size_bytes=stored.size_bytes,
            rank=stored.rank,
            promoted=promoted,
            report=stored.report,
        )

    async def _require_reachable(self, tenant_id: UUID, name: str) -> None:
        if self._served_model_name is not None:
            async with self._database.as_tenant(tenant_id) as session:
                repository = AdapterRepository(session, tenant_id)
                await repository.require_reachable(name, self._served_model_name)

    async def _keep(self, tenant_id: UUID, folder: Path) -> Validated:
        stored = await asyncio.to_thread(self._store, tenant_id, folder)
        if self._blobs is not None:
            await self._blobs.publish(tenant_id, stored.digest)
        return stored

    def _store(self, tenant_id: UUID, folder: Path) -> Validated:
        if not folder.is_dir():
            raise FolderRejected(folder.name, f"is not a folder of {CONFIG_FILE} and {WEIGHTS_FILE}")
        limits = self._limits
        with self._storage.staging() as staged:
            copy_regular(folder / CONFIG_FILE, staged / CONFIG_FILE, max_bytes=limits.max_config_bytes)
            if (folder / PICKLE_FILE).exists() and not (folder / WEIGHTS_FILE).exists():
                raise FolderRejected(PICKLE_FILE, f"is a pickle; save the adapter as {WEIGHTS_FILE}")
            copy_regular(folder / WEIGHTS_FILE, staged / WEIGHTS_FILE, max_bytes=limits.max_weights_bytes)
            with open_upload(staged, limits) as files:
                validated = examine(files, self._modules, self._base_model_digest, limits)
            keep_canonical(staged, validated.canonical)
            self._storage.put(tenant_id, validated.digest, staged)
        return validated


async def delete_adapter(database: Database, remove: RemoveBlob, tenant_id: UUID, name: str) -> None:
    """Delete the name with its aliases, and each blob that no other adapter of the tenant and no request uses.

    A running server deletes the other blobs later. Raises `AdapterNotFound`.
    """
    async with database.as_tenant(tenant_id) as session:
        adapter = await AdapterDeletion(session, tenant_id).remove_adapter(name)
    async with database.as_operator() as session:
        blobs = await UnusedBlobs(session).of_adapter(adapter)
    for blob in blobs:
        await remove_unused(database, remove, blob)
