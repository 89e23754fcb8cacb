"""The rows of a tenant's uploads: the declared files, the stored parts, and the outcome.

Invariant: parts change only while their upload is open and no gateway assembles it; every upload ends once.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

from sqlalchemy import ColumnElement, Select, delete, exists, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.database import lock
from loraplex.tenants.errors import (
    CountReached,
    IdempotencyInUse,
    IdempotencyMismatch,
    UploadClaimed,
    UploadEnded,
    UploadNotFound,
)
from loraplex.tenants.models import Adapter, AdapterVersion, Upload, UploadPart
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.registry.storage_quota import StorageQuota

OPEN, COMPLETED, ABORTED, EXPIRED = "open", "completed", "aborted", "expired"


@dataclass(frozen=True, slots=True)
class DeclaredFile:
    """A declared file: `size` in bytes, `sha256` in 64 hexadecimal digits."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class UploadTerms:
    """The part size in bytes and the lifetime of an upload, and the number that a tenant may have open."""

    part_bytes: int
    lifetime: timedelta
    max_open: int


class UploadRepository:
    """The uploads of `tenant_id`, seen by one session."""

    def __init__(self, session: AsyncSession, tenant_id: UUID) -> None:
        self._session = session
        self._tenant_id = tenant_id

    async def _check_room(self, adapter: str, size_bytes: int, terms: UploadTerms) -> Adapter:
        """The adapter, if an upload of so many bytes may begin. Raises what `open` does."""
        found = await AdapterRepository(self._session, self._tenant_id).get(adapter)
        await self._require_few(terms)
        await StorageQuota(self._session, self._tenant_id).require(size_bytes, found.id)
        return found

    async def open(
        self, adapter: str, files: Sequence[DeclaredFile], terms: UploadTerms, created_by: str | None
    ) -> Upload:
        """Open an upload and reserve its bytes. Raises `AdapterNotFound`, `CountReached`."""
        await StorageQuota(self._session, self._tenant_id).lock()
        return await self._add(adapter, files, _total(files), terms, created_by, uuid4())

    async def _add(
        self,
        adapter: str,
        files: Sequence[DeclaredFile],
        size_bytes: int,
        terms: UploadTerms,
        created_by: str | None,
        upload_id: UUID,
    ) -> Upload:
        found = await self._check_room(adapter, size_bytes, terms)
        upload = Upload(
            id=upload_id,
            tenant_id=self._tenant_id,
            adapter_id=found.id,
            files=[asdict(file) for file in files],
            size_bytes=size_bytes,
            part_size=terms.part_bytes,
            state=OPEN,
            created_by=created_by,
            expires_at=datetime.now(UTC) + terms.lifetime,
        )
        self._session.add(upload)
        await self._session.flush()
        return upload

    async def reserve_whole(
        self,
        adapter: str,
        size_bytes: int,
        terms: UploadTerms,
        created_by: str | None,
        *,
        upload_id: UUID,
        lease: timedelta,
    ) -> Upload:
        """Open an upload whose files arrive in one body of at most `size_bytes`, claimed for `lease`.

        A repetition gets the first one: completed, or claimed again. Raises what `open` does, `IdempotencyMismatch` for a
        repetition with another adapter, `IdempotencyInUse`.
        """
        quota = StorageQuota(self._session, self._tenant_id)
        await quota.lock()
        query = self._own(upload_id).with_for_update()
        upload = (await self._session.scalars(query)).one_or_none()
        if upload is None:
            upload = await self._add(adapter, (), size_bytes, terms, created_by, upload_id)
        elif await self.adapter_name(upload) != adapter:
            raise IdempotencyMismatch("the Idempotency-Key was used for another adapter")
        elif upload.state == COMPLETED:
            return upload
        elif _is_claimed(upload):
            raise IdempotencyInUse("the first upload with this Idempotency-Key is still running")
        elif upload.state == OPEN:
            await quota.require(size_bytes - upload.size_bytes, upload.adapter_id)
        else:
            upload.adapter_id = (await self._check_room(adapter, size_bytes, terms)).id
            upload.state = OPEN
        upload.size_bytes = size_bytes
        # If this process dies, the bytes are free when the claim ends.
        upload.expires_at = upload.claimed_until = datetime.now(UTC) + lease
        return upload

    async def declare(
        self, upload_id: UUID, files: Sequence[DeclaredFile], ends: Collection[datetime | None]
    ) -> None:
        """Record the files of a body that has arrived, and reserve their exact size.

        Raises `UploadEnded`, `UploadClaimed` as `complete` does, `CountReached`, and `IdempotencyMismatch` if an earlier
        attempt had other files.
        """
        quota = StorageQuota(self._session, self._tenant_id)
        await quota.lock()
        upload = await self.locked(upload_id)
        if upload.state != OPEN:
            raise _ended(upload)
        _require_own(upload, ends)
        require_same(upload, files)
        await quota.require(_total(files) - upload.size_bytes, upload.adapter_id)
        upload.files, upload.size_bytes = [asdict(file) for file in files], _total(files)

    async def get(self, upload_id: UUID) -> Upload:
        """Raises `UploadNotFound`."""
        return await self._one(self._own(upload_id))

    async def require_open(self, upload_id: UUID) -> Upload:
        """Raises `UploadNotFound`, `UploadEnded`, or `UploadClaimed` while its parts are assembled."""
        upload = await self.get(upload_id)
        _require_open(upload)
        return upload

    async def open_of(self, adapter_id: UUID) -> Sequence[Upload]:
        """The adapter's open uploads with declared files, newest first."""
        query = select(Upload).where(
            Upload.tenant_id == self._tenant_id,
            Upload.adapter_id == adapter_id,
            Upload.state == OPEN,
            Upload.expires_at > datetime.now(UTC),
            func.jsonb_array_length(Upload.files) > 0,
        )
        return (await self._session.scalars(query.order_by(Upload.created_at.desc(), Upload.id))).all()

    async def adapter_name(self, upload: Upload) -> str:
        """The name of its adapter, deleted or not."""
        query = select(Adapter.name).where(Adapter.id == upload.adapter_id)
        return (await self._session.scalars(query)).one()

    async def made_version(self, upload: Upload) -> AdapterVersion:
        """The version of a completed upload."""
        query = select(AdapterVersion).where(
            AdapterVersion.adapter_id == upload.adapter_id, AdapterVersion.version == upload.version
        )
        return (await self._session.scalars(query)).one()

    async def parts(self, upload_id: UUID) -> Sequence[UploadPart]:
        """The stored parts, by file and number."""
        query = select(UploadPart).where(
            UploadPart.tenant_id == self._tenant_id, UploadPart.upload_id == upload_id
        )
        return (await self._session.scalars(query.order_by(UploadPart.file, UploadPart.number))).all()

    async def received(self, upload_ids: Collection[UUID]) -> dict[UUID, int]:
        """The bytes of the stored parts of uploads; one without any is absent."""
        query = select(UploadPart.upload_id, func.sum(UploadPart.size_bytes))
        query = query.where(UploadPart.tenant_id == self._tenant_id, UploadPart.upload_id.in_(upload_ids))
        found = await self._session.execute(query.group_by(UploadPart.upload_id))
        return {upload_id: int(size) for upload_id, size in found}

    async def record_part(
        self, upload_id: UUID, file: str, number: int, *, size_bytes: int, sha256: str, object_id: UUID
    ) -> UUID | None:
        """Record a stored part; return the object that it replaces, if any. Raises what `require_open` does."""
        _require_open(await self._one(self._own(upload_id).with_for_update(read=True)))
        keys = {"upload_id": upload_id, "file": file, "number": number}
        query = select(UploadPart).filter_by(**keys, tenant_id=self._tenant_id)
        await self._lock_part(upload_id, file, number)
        part = (await self._session.scalars(query)).one_or_none()
        replaced = None if part is None else part.object_id
        if part is None:
            part = UploadPart(**keys, tenant_id=self._tenant_id)
            self._session.add(part)
        part.size_bytes, part.sha256, part.object_id = size_bytes, sha256, object_id
        part.received_at = datetime.now(UTC)
        await self._session.flush()
        return replaced

    async def claim(self, upload_id: UUID, lease: timedelta) -> Upload:
        """Claim an open upload for `lease`; return a completed one unchanged.

        Raises `UploadNotFound`, `UploadEnded`, `UploadClaimed`.
        """
        upload = await self.locked(upload_id)
        if upload.state != COMPLETED:
            _require_open(upload)
            upload.claimed_until = datetime.now(UTC) + lease
        return upload

    async def renew(self, upload_id: UUID, ends: Collection[datetime | None], end: datetime) -> None:
        """Extend a claim to `end`. `ends`: the expiry times that it may have now. Raises `UploadEnded`, `UploadClaimed`."""
        upload = await self.locked(upload_id)
        if upload.state != OPEN:
            raise _ended(upload)
        _require_own(upload, ends)
        upload.claimed_until, upload.expires_at = end, max(upload.expires_at, end)

    async def release(self, upload_id: UUID, ends: Collection[datetime | None]) -> bool:
        """End a claim with one of the expiry times `ends`; the upload stays open. False if the claim is another's."""
        upload = await self.locked(upload_id)
        if upload.claimed_until not in ends:
            return False
        upload.claimed_until = None
        return True

    async def complete(
        self, upload_id: UUID, made: AdapterVersion, ends: Collection[datetime | None]
    ) -> None:
        """Complete an upload with the version `made`. Raises `UploadNotFound`, `UploadEnded`, or `UploadClaimed` if its claim
        has none of the expiry times `ends`.

        Deleting an adapter ends its uploads, so a new adapter of the same name gets none of them.
        """
        upload = await self.locked(upload_id)
        if upload.state != OPEN or made.adapter_id != upload.adapter_id:
            raise _ended(upload)
        _require_own(upload, ends)
        upload.state, upload.version, upload.claimed_until = COMPLETED, made.version, None

    async def abort(self, upload_id: UUID) -> Upload:
        """Abort an upload; may be repeated. Raises `UploadNotFound`, `UploadEnded`, `UploadClaimed`."""
        upload = await self.locked(upload_id)
        if upload.state == COMPLETED:
            raise _ended(upload)
        if upload.state == OPEN:
            _require_unclaimed(upload)
            upload.state = ABORTED
        return upload

    async def _require_few(self, terms: UploadTerms) -> None:
        query = (
            select(func.count())
            .select_from(Upload)
            .where(Upload.tenant_id == self._tenant_id, Upload.state == OPEN)
        )
        if (await self._session.scalar(query) or 0) >= terms.max_open:
            raise CountReached(
                "max_open_uploads",
                f"{terms.max_open} uploads are open, which is the most; complete or abort one, or let it expire",
            )

    async def _lock_part(self, upload_id: UUID, file: str, number: int) -> None:
        """Lock a part's number: two first uploads of it find no row that they could lock."""
        await lock(self._session, f"loraplex upload part {upload_id} {file} {number}")

    async def locked(self, upload_id: UUID) -> Upload:
        """The upload, locked until the transaction ends. Raises `UploadNotFound`."""
        return await self._one(self._own(upload_id).with_for_update())

    def _own(self, upload_id: UUID) -> Select[Upload]:
        return select(Upload).where(Upload.tenant_id == self._tenant_id, Upload.id == upload_id)

    async def _one(self, query: Select[Upload]) -> Upload:
        upload = (await self._session.scalars(query.execution_options(populate_existing=True))).one_or_none()
        if upload is None:
            raise UploadNotFound("no such upload")
        return upload


class ExpiredUploads:
    """Ends expired uploads of all tenants; for an operator's session."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def expire(self) -> int:
        """End open uploads that have expired or whose adapter was deleted; return their number."""
        now = datetime.now(UTC)
        dead = exists().where(Adapter.id == Upload.adapter_id, Adapter.deleted_at.is_not(None))
        statement = (
            update(Upload)
            .where(Upload.state == OPEN, or_(Upload.expires_at <= now, dead), _unclaimed(now))
            .values(state=EXPIRED)
        )
        return len((await self._session.execute(statement.returning(Upload.id))).all())

    async def ended_with_parts(self, limit: int) -> Sequence[Upload]:
        """Ended uploads with recorded parts."""
        noted = exists().where(UploadPart.upload_id == Upload.id)
        query = select(Upload).where(Upload.state != OPEN, noted).limit(limit)
        return (await self._session.scalars(query)).all()

    async def forget_parts(self, upload_id: UUID) -> None:
        """Remove the rows of parts whose objects are removed."""
        await self._session.execute(delete(UploadPart).where(UploadPart.upload_id == upload_id))

    async def open_among(self, upload_ids: Iterable[UUID]) -> set[UUID]:
        """The open ones of these uploads."""
        query = select(Upload.id).where(Upload.id.in_([*upload_ids]), Upload.state == OPEN)
        return {*await self._session.scalars(query)}

    async def forget_ended(self, before: datetime) -> int:
        """Remove rows of uploads that ended and expired before a time; return their number."""
        statement = delete(Upload).where(Upload.state != OPEN, Upload.expires_at < before)
        return len((await self._session.execute(statement.returning(Upload.id))).all())


def require_same(upload: Upload, files: Sequence[DeclaredFile]) -> None:
    """Raise `IdempotencyMismatch` if an earlier attempt declared other files."""
    if upload.files and upload.files != [asdict(file) for file in files]:
        raise IdempotencyMismatch("the Idempotency-Key was used for other files")


def _total(files: Sequence[DeclaredFile]) -> int:
    return sum(file.size for file in files)


def _require_open(upload: Upload) -> None:
    if upload.state != OPEN or upload.expires_at <= datetime.now(UTC):
        raise _ended(upload)
    _require_unclaimed(upload)


def _is_claimed(upload: Upload) -> bool:
    return (
        upload.state == OPEN and upload.claimed_until is not None and upload.claimed_until > datetime.now(UTC)
    )


def _require_unclaimed(upload: Upload) -> None:
    if _is_claimed(upload):
        raise UploadClaimed("the upload's parts are being put together")


def _require_own(upload: Upload, ends: Collection[datetime | None]) -> None:
    """Whether the claim is the caller's: an expired claim stays its own until another one takes over."""
    if upload.claimed_until not in ends:
        raise UploadClaimed("another request has claimed the upload since")


def _unclaimed(now: datetime) -> ColumnElement[bool]:
    return or_(Upload.claimed_until.is_(None), Upload.claimed_until <= now)


def _ended(upload: Upload) -> UploadEnded:
    state = EXPIRED if upload.state == OPEN else upload.state
    return UploadEnded(f"the upload is {state}: begin another")
