"""Use case: push a folder of this machine as a new version of a tenant's adapter.

Invariant: a pushed version takes the way of an uploaded one: registered as `validating`, validated in a sandbox, probed by an
engine, ready. Only `push_unprobed` skips the probe, and the audit log records that.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

from loraplex.adapters.errors import FolderRejected, StorageError, VersionRejected
from loraplex.adapters.limits import DEFAULT_LIMITS
from loraplex.adapters.report import Check, ValidationReport
from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.storage.free_space import disk_errors, require_free
from loraplex.adapters.storage.local_store import CONFIG_FILE, WEIGHTS_FILE, max_file_bytes, remove_staged
from loraplex.adapters.storage.safe_files import copy_opened, open_regular
from loraplex.adapters.storage.threads import on_thread
from loraplex.adapters.validation.result import Rejected, Validated
from loraplex.adapters.validation.upload_files import PICKLE_FILE, PICKLE_REASON
from loraplex.adapters.versions.lifecycle import register_folder
from loraplex.adapters.versions.pending_folders import PendingFolder, PendingFolders
from loraplex.adapters.versions.version_job import LifecycleConfig, Validation, VersionJob
from loraplex.tenants.administration import adapters, gated_aliases, versions
from loraplex.tenants.database import Database
from loraplex.tenants.errors import AdapterNotFound
from loraplex.tenants.models import Adapter, AdapterVersion
from loraplex.tenants.names import check_adapter_name
from loraplex.tenants.registry.adapters import AdapterRepository, profile_of
from loraplex.tenants.registry.aliases import AliasRepository
from loraplex.tenants.registry.records import SERVING_STATES, WHOLE, AdapterProfile, ProfileChange
from loraplex.tenants.registry.resolution import PRODUCTION
from loraplex.tenants.registry.storage_quota import StorageQuota
from loraplex.tenants.registry.versions import PendingVersion
from loraplex.tenants.unit_of_work import UnitOfWork

Promotion: TypeAlias = Literal["always", "first", "never"]
"""When `production` moves to a pushed version: always, only where the adapter has none before it, or never."""
OpenUnit: TypeAlias = Callable[[UUID], AbstractAsyncContextManager[UnitOfWork]]
"""Opens a unit of work in the role of a tenant."""
POLL_S: Final = 0.2
VALIDATING: Final = "validating"


@dataclass(frozen=True, slots=True, kw_only=True)
class PushRequest:
    """`profile` None: that of the base model, which may be changed until the version's first alias."""

    name: str
    folder: Path
    promote: Promotion = "always"
    profile: AdapterProfile | None = None

    def promotes(self, is_first: bool) -> bool:
        """Return whether `production` moves. `is_first`: the adapter has no earlier version that could be served."""
        return self.promote == "always" or (self.promote == "first" and is_first)

    def profile_change(self) -> ProfileChange:
        """Return the change that gives a version this profile."""
        profile = self.profile or AdapterProfile()
        styles: ProfileChange = {
            "tool_style": profile.tool_style,
            "reasoning_style": profile.reasoning_style,
        }
        return {**styles, "defaults": dict(profile.defaults), "decision": profile.decision}


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedVersion:
    """A version in the state `ready`, or `validating` if no server runs that could probe it.

    `promoted`: whether the alias `production` now names it. `size_bytes` is that of the weights. `digest` and `rank` are None
    if a server ended during the validation.
    """

    name: str
    version: int
    state: str
    digest: str | None
    rank: int | None
    size_bytes: int
    promoted: bool
    report: ValidationReport


class FolderPush:
    """Pushes folders into the storage of one data directory."""

    def __init__(
        self,
        database: Database,
        open_unit: OpenUnit,
        store: BlobStore,
        validation: Validation,
        *,
        base_model: str | None = None,
        storage_floor_bytes: int = 0,
    ) -> None:
        """No new adapter may be named `base_model`. `validation` is used where no server validates."""
        self._database = database
        self._open_unit = open_unit
        self._storage = store.storage
        self._folders = PendingFolders(store.storage.root)
        self._validation = validation
        self._base_model = base_model
        self._storage_floor_bytes = storage_floor_bytes
        # Without a prober no engine needs a namespace.
        self._job = VersionJob(database, validation, None, store, lambda _: b"", LifecycleConfig())

    async def push(self, tenant_id: UUID, request: PushRequest) -> PushedVersion:
        """Register a version, and wait until a server on this data directory has validated and probed it.

        Without a server, validate the folder here first; the version stays `validating` until a server starts and probes it.
        Raises `InvalidName`, `CountReached`, `AdapterRejected`, `ValidationUnavailable`, `StorageError`. What is refused
        before a server gets it leaves nothing.
        """
        check_adapter_name(request.name)
        staged, validated = await on_thread(self._stage, request.folder), None
        try:
            if not self._folders.is_watched():
                validated = await self._validated(tenant_id, staged)
            record, pending = await self._register(tenant_id, request, staged)
        finally:
            await on_thread(remove_staged, staged)
        if pending is not None:
            pending.unlock()
        if validated is not None:
            return _pushed(request, record, validated=validated)
        record = await self._result(tenant_id, request.name, record)
        if record.state == VALIDATING:
            return _pushed(request, record)
        promoted = await self._promote(tenant_id, request, record)
        return _pushed(request, record, promoted)

    async def push_unprobed(self, tenant_id: UUID, request: PushRequest) -> PushedVersion:
        """Validate and store a folder here, and make the version ready without an engine's probe.

        A version of equal content stays the only one; it takes `profile` if it had no alias yet. Raises as `push`. A version that
        could not be stored waits for a server, as in `push`.
        """
        check_adapter_name(request.name)
        staged = await on_thread(self._stage, request.folder)
        try:
            validated = await self._validated(tenant_id, staged)
            record, pending = await self._register(tenant_id, request, staged, unprobed=validated)
        finally:
            await on_thread(remove_staged, staged)
        if pending is not None:
            try:
                await self._job.finish(PendingVersion(tenant_id, record.id), pending, validated)
            finally:
                pending.unlock()
            record = await self._version(tenant_id, request.name, record.version)
        promoted = await self._promote(tenant_id, request, record)
        return _pushed(request, record, promoted)

    def _stage(self, folder: Path) -> Path:
        """Copy the two files to a private folder. Raises `FolderRejected`, `StorageError`."""
        if not folder.is_dir():
            raise FolderRejected(folder.name, f"is not a folder of {CONFIG_FILE} and {WEIGHTS_FILE}")
        if (folder / PICKLE_FILE).exists() and not (folder / WEIGHTS_FILE).exists():
            raise FolderRejected(PICKLE_FILE, PICKLE_REASON)
        self._require_owner()
        staged = self._storage.make_staged()
        try:
            for name, max_bytes in max_file_bytes(DEFAULT_LIMITS).items():
                with open_regular(folder / name, max_bytes=max_bytes) as file:
                    require_free(staged, self._storage_floor_bytes, file.size)
                    with disk_errors():
                        copy_opened(file, staged / name)
        except EOFError as error:
            remove_staged(staged)
            raise FolderRejected(folder.name, "changed while it was read") from error
        except BaseException:
            remove_staged(staged)
            raise
        return staged

    def _require_owner(self) -> None:
        """Raise `StorageError` where a server of another user could not read the files, as after `sudo`."""
        root = self._storage.root
        if root.exists() and (owner := root.stat().st_uid) != os.geteuid():
            raise StorageError(f"{root} belongs to the user with uid {owner}: push as that user")

    async def _validated(self, tenant_id: UUID, staged: Path) -> Validated:
        result = await self._validation.validate(tenant_id, staged)
        if isinstance(result, Rejected):
            raise VersionRejected(result.check, result.subject, result.message, result.report)
        return result

    async def _register(
        self, tenant_id: UUID, request: PushRequest, staged: Path, unprobed: Validated | None = None
    ) -> tuple[AdapterVersion, PendingFolder | None]:
        """Register the version; return its files too, unless it existed already. `unprobed`: the content of a version that is not
        probed, of which there is one only.
        """
        name = request.name
        async with self._open_unit(tenant_id) as uow:
            quota = StorageQuota(uow.session, tenant_id)
            await quota.lock()
            adapter = await self._ensure_adapter(uow, tenant_id, name)
            if unprobed is not None:
                repository = AdapterRepository(uow.session, tenant_id)
                equal = await repository.equal_version(name, unprobed.digest, request.profile)
                # A push that was interrupted may have left one that is `validating`: only a server ends it.
                if equal is not None and equal.state != VALIDATING:
                    return await _with_profile(uow, tenant_id, request, equal), None
            await quota.require((staged / WEIGHTS_FILE).stat().st_size, adapter.id)
            made = await register_folder(
                uow, tenant_id, self._folders, name, staged, is_probed=unprobed is None
            )
            return await _with_profile(uow, tenant_id, request, made.record), made.pending

    async def _ensure_adapter(self, uow: UnitOfWork, tenant_id: UUID, name: str) -> Adapter:
        repository = AdapterRepository(uow.session, tenant_id)
        with suppress(AdapterNotFound):
            return await repository.get(name)
        await adapters.create(uow, tenant_id, name, base_model=self._base_model)
        return await repository.get(name)

    async def _result(self, tenant_id: UUID, name: str, registered: AdapterVersion) -> AdapterVersion:
        """Wait until a server has ended the validation, or no server runs any more.

        Raises `VersionRejected`, or `StorageError` if a server of another database has discarded the folder.
        """
        while True:
            # Before the query: a server may end right after it has written the result.
            is_watched = self._folders.is_watched()
            is_pending = self._folders.is_pending(registered.id)
            record = await self._version(tenant_id, name, registered.version)
            if record.state == "rejected":
                raise rejection(report_of(record.report["checks"]))
            if record.state == VALIDATING and not is_pending:
                raise StorageError(
                    "the server on this data directory uses another database: check DATABASE_URL"
                )
            if record.state != VALIDATING or not is_watched:
                return record
            await asyncio.sleep(POLL_S)

    async def _version(self, tenant_id: UUID, name: str, number: int) -> AdapterVersion:
        async with self._database.as_tenant(tenant_id) as session:
            return await AdapterRepository(session, tenant_id).version(name, number)

    async def _promote(self, tenant_id: UUID, request: PushRequest, record: AdapterVersion) -> bool:
        if request.promote == "never":
            return False
        async with self._open_unit(tenant_id) as uow:
            promoted = request.promotes(await _is_first(uow, tenant_id, request.name, record))
            if promoted:
                await gated_aliases.move(uow, tenant_id, request.name, PRODUCTION, {record.version: WHOLE})
        return promoted


async def _is_first(uow: UnitOfWork, tenant_id: UUID, name: str, record: AdapterVersion) -> bool:
    """Return whether there is neither `production` nor an earlier version that could be served.

    An interrupted push therefore promotes the version when it is repeated. A version that has had an alias lost it on purpose.
    """
    adapters = AdapterRepository(uow.session, tenant_id)
    # Locked: of two first pushes one promotes.
    adapter = await adapters.locked(name)
    production = await AliasRepository(uow.session, tenant_id).find(adapter, PRODUCTION)
    if record.aliased_at is not None or production is not None:
        return False
    present = await adapters.versions(name)
    return not any(each.version < record.version and each.state in SERVING_STATES for each in present)


def report_of(checks: Iterable[Mapping[str, Any]]) -> ValidationReport:
    """Return the report of a version's row or of its response."""
    return ValidationReport(tuple(Check(**check) for check in checks))


def rejection(report: ValidationReport) -> VersionRejected:
    """Return the error of a rejected version; the last check of its report is the one that failed."""
    last = report.checks[-1]
    subject, _, message = last.detail.partition(": ")
    return VersionRejected(last.name, subject, message, report)


async def _with_profile(
    uow: UnitOfWork, tenant_id: UUID, request: PushRequest, record: AdapterVersion
) -> AdapterVersion:
    if request.profile is None or request.profile == profile_of(record):
        return record
    change = request.profile_change()
    await versions.change_profile(uow, tenant_id, request.name, record.version, change)
    return record


def _pushed(
    request: PushRequest, record: AdapterVersion, promoted: bool = False, validated: Validated | None = None
) -> PushedVersion:
    """`validated`: what the command found, where no server has written it to `record`."""
    return PushedVersion(
        name=request.name,
        version=record.version,
        state=record.state,
        digest=record.digest if validated is None else validated.digest,
        size_bytes=record.size_bytes,
        rank=record.rank if validated is None else validated.rank,
        promoted=promoted,
        report=report_of(record.report["checks"]) if validated is None else validated.report,
    )
