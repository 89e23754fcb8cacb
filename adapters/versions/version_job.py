"""`VersionJob`: takes one uploaded folder through validation, the engine's probe and storage, and records the result.

Invariant: only the adapter's own faults reject it; failures on the server's side are retried until `give_up_s`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol
from uuid import UUID

import structlog

from loraplex.adapters.errors import AdaptersError, BlobMissing
from loraplex.adapters.report import Check, ValidationReport
from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.storage.local_store import keep_canonical
from loraplex.adapters.validation.result import Rejected, Validated, ValidationResult, refused
from loraplex.adapters.versions.pending_folders import PendingFolder
from loraplex.engine.client import EngineClient
from loraplex.engine.errors import EngineError
from loraplex.engine.messages import AdapterRef, ProbeReport
from loraplex.tenants.actors import Actor
from loraplex.tenants.audit_log import AuditRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import NotFound, StoreUnavailable, TenantsError, VersionStateChanged
from loraplex.tenants.registry.versions import (
    FINGERPRINT,
    Findings,
    PendingVersion,
    PendingVersions,
    VersionStates,
)

PROBE_CHECK = "probe"
NOT_PROBED = Check(PROBE_CHECK, True, "not run: the version was pushed without it", warning=True)


def probe_check(report: ProbeReport) -> Check:
    """Convert a probe report to a check. An adapter without effect passes with a warning, as in validation."""
    if report.code is not None:
        return Check(PROBE_CHECK, False, f"{report.code}: {report.message}{_figures(report)}")
    done = f"{report.modules} modules agree with the reference{_figures(report)}"
    answer = f"{report.generated_tokens} tokens were generated"
    if not report.effect:
        return Check(PROBE_CHECK, True, f"{done}; {answer}; the adapter changes nothing", warning=True)
    return Check(PROBE_CHECK, True, f"{done}; {answer}")


def _figures(report: ProbeReport) -> str:
    if not report.max_error:
        return ""
    errors = ", ".join(f"{kind} {error:.2g}" for kind, error in sorted(report.max_error.items()))
    return f" (greatest relative errors: {errors}; allowed: {report.bound:.2g})"


SYSTEM: Final = Actor("system", "validation")
INTERRUPTED: Final = refused(
    "interrupted", "the upload", "the server that validated it ended, and its files are gone; upload it again"
)


class Validation(Protocol):
    """The interface of `AdapterValidation`, which runs `validate_files` in a worker process."""

    async def validate(self, tenant_id: UUID, folder: Path) -> ValidationResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleConfig:
    """Times in seconds. A server-side failure is retried after `retry_s`, then after twice as long, up to
    `max_retry_s`.

    A version is rejected after `give_up_s` of retries, and at the latest twice as long after its upload. Unlocked
    folders are searched every `resume_s`, versions without files every `sweep_s`.
    """

    retry_s: float = 1.0
    max_retry_s: float = 60.0
    give_up_s: float = 3600.0
    resume_s: float = 1.0
    sweep_s: float = 10.0
    max_waiting: int = 256
    max_waiting_per_tenant: int = 16


@dataclass(slots=True)
class _Progress:
    """The finished steps, which a retry skips. `probed_by`: the member of the stored report that names the engine."""

    validated: Validated | None = None
    probe: Check | None = None
    probed_by: dict[str, str] = field(default_factory=dict)
    is_stored: bool = False


class VersionJob:
    """`namespace_of`: tenant -> its 32-byte cache namespace. `prober` None: versions are accepted without a probe."""

    def __init__(
        self,
        database: Database,
        validation: Validation,
        prober: EngineClient | None,
        store: BlobStore,
        namespace_of: Callable[[UUID], bytes],
        limits: LifecycleConfig,
    ) -> None:
        self._database = database
        self._validation = validation
        self._prober = prober
        self._store = store
        self.namespace_of = namespace_of
        self._limits = limits
        self._log = structlog.get_logger("loraplex.lifecycle")

    async def run(self, version: PendingVersion, pending: PendingFolder) -> None:
        """Run until the result is written and the files are not needed. A cancelled job leaves them to the next
        process.
        """
        try:
            async with asyncio.timeout(self._limits.give_up_s):
                await self._retry_until_done(version, pending)
        except TimeoutError:
            timed_out = refused("patience", "the upload", "could not be validated in time; upload it again")
            await self.reject(version, timed_out)
            pending.discard()

    async def finish(self, version: PendingVersion, pending: PendingFolder, validated: Validated) -> None:
        """Probe, store and accept a validated version, once. Raises what these steps raise; the files stay then."""
        await self._attempt(version, pending.folder, _Progress(validated))
        pending.discard()

    async def _probe(self, tenant_id: UUID, digest: str, folder: Path, progress: _Progress) -> Check:
        if self._prober is None:
            return NOT_PROBED
        namespace = self.namespace_of(tenant_id)
        adapter = AdapterRef(namespace=namespace, digest=digest, blob_path=str(folder))
        report = await self._prober.probe(adapter)
        if report.system_fingerprint is not None:
            progress.probed_by = {FINGERPRINT: report.system_fingerprint}
        return probe_check(report)

    async def end_without_files(self, version: PendingVersion) -> None:
        """End a version whose uploaded files are gone: ready if they are stored, else rejected.

        Raises `StorageError` while storage is unavailable.
        """
        if not await self._finish_stored(version):
            await self.reject(version, INTERRUPTED)

    async def _finish_stored(self, version: PendingVersion) -> bool:
        """Finish a version whose checks all passed and whose files are stored; return whether it was one."""
        if version.digest is None:
            return False
        try:
            # They may be on this machine alone, if its server died before the upload to the bucket.
            await self._store.ensure_stored(version.tenant_id, version.digest)
            await self._move(version, "ready")
        except (BlobMissing, VersionStateChanged, NotFound) as error:
            self._log.info("version not finished", reason=str(error))
            return False
        return True

    async def reject(self, version: PendingVersion, rejected: Rejected) -> None:
        """Reject the version, unless it already has a result."""
        report = {"checks": rejected.report.as_dicts()}
        reason = f"{rejected.check}: {rejected.subject}: {rejected.message}"
        try:
            await self._move(version, "rejected", report=report, reason=reason)
        except (VersionStateChanged, NotFound) as error:
            self._log.info("version not rejected", reason=str(error))

    async def _retry_until_done(self, version: PendingVersion, pending: PendingFolder) -> None:
        progress, delay_s = _Progress(), self._limits.retry_s
        while True:
            try:
                await self._attempt(version, pending.folder, progress)
            except (VersionStateChanged, NotFound) as error:
                self._log.info("another process changed the version", reason=str(error))
                return pending.discard()
            except (AdaptersError, EngineError, TenantsError, OSError) as error:
                self._log.warning("upload not validated yet", reason=str(error), again_in_s=delay_s)
            except Exception:  # noqa: BLE001 - logged; the version is retried until `give_up_s`
                self._log.exception("validating an upload failed", again_in_s=delay_s)
            else:
                return pending.discard()
            await asyncio.sleep(delay_s)
            if await self._is_gone(version):
                return pending.discard()
            delay_s = min(2 * delay_s, self._limits.max_retry_s)

    async def _is_gone(self, version: PendingVersion) -> bool:
        """Return whether the version was deleted, with its tenant for example. False while the database is down."""
        try:
            async with self._database.as_operator() as session:
                return await PendingVersions(session).get(version.version_id) is None
        except StoreUnavailable:
            return False

    async def _attempt(self, version: PendingVersion, folder: Path, progress: _Progress) -> None:
        validated = progress.validated
        if validated is None and not await asyncio.to_thread(folder.is_dir):
            return await self.end_without_files(version)
        if validated is None:
            result = await self._validation.validate(version.tenant_id, folder)
            if isinstance(result, Rejected):
                return await self.reject(version, result)
            validated = progress.validated = result
        if progress.probe is None:
            await asyncio.to_thread(keep_canonical, folder, validated.canonical)
            progress.probe = await self._probe(version.tenant_id, validated.digest, folder, progress)
        report = validated.report.with_check(progress.probe)
        if not progress.probe.passed:
            return await self.reject(version, _rejected_by_probe(progress.probe, report))
        if not progress.is_stored:
            stored = {"checks": report.as_dicts(), **progress.probed_by}
            await self._note(version, validated, stored)
            await self._store.store(version.tenant_id, validated.digest, folder)
            progress.is_stored = True
        await self._move(version, "ready")

    async def _note(self, version: PendingVersion, validated: Validated, report: Mapping[str, Any]) -> None:
        findings = Findings(validated.digest, validated.rank, validated.config)
        async with self._states(version.tenant_id) as states:
            await states.note(version.version_id, findings, report)

    async def _move(
        self,
        version: PendingVersion,
        to: str,
        report: Mapping[str, Any] | None = None,
        reason: str | None = None,
    ) -> None:
        async with self._states(version.tenant_id) as states:
            await states.move(version.version_id, to, expected=("validating",), report=report, reason=reason)

    @asynccontextmanager
    async def _states(self, tenant_id: UUID) -> AsyncIterator[VersionStates]:
        async with self._database.as_tenant(tenant_id) as session:
            yield VersionStates(session, tenant_id, AuditRepository(session, SYSTEM, tenant_id))


def _rejected_by_probe(check: Check, report: ValidationReport) -> Rejected:
    return Rejected(check=PROBE_CHECK, subject="the adapter", message=check.detail, report=report)
