"""Opens the storage of adapters and uploads: the data directory, or a bucket with copies in the data directory."""

from typing import Final

from loraplex.adapters.limits import AdapterLimits, UploadConfig
from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.storage.local_cache import LocalCacheConfig
from loraplex.adapters.storage.local_store import ADAPTERS_FOLDER, LocalAdapterStore
from loraplex.adapters.storage.object_store import ObjectStore, S3Options
from loraplex.adapters.uploads.cleanup import UploadCleanup
from loraplex.adapters.uploads.parts import UploadParts
from loraplex.adapters.uploads.service import Lifecycle, Uploads
from loraplex.platform.config import Settings
from loraplex.platform.startup_errors import SettingsError
from loraplex.tenants.database import Database

OBJECTS_FOLDER: Final = "objects"
COPY_MARGIN_SECONDS: Final = 300.0
"""A copy is kept this much longer than the longest request that may read it."""


class BlobStorage:
    """Storage of an installation: `adapters` for stored adapters, `parts` for open uploads, `local` for the files that engines read."""

    def __init__(self, settings: Settings, base_model_digest: str) -> None:
        bucket = s3_options(settings)
        objects = ObjectStore(settings.data_dir / OBJECTS_FOLDER, bucket)
        self.local = LocalAdapterStore(settings.data_dir / ADAPTERS_FOLDER)
        self.adapters = BlobStore(
            self.local,
            objects if bucket else None,
            base_model_digest,
            copy_limits=copy_limits(settings),
        )
        self.parts = UploadParts(objects, settings.storage_floor_bytes)
        self._limits = upload_limits(settings)

    def uploads(self, database: Database, lifecycle: Lifecycle, adapter_limits: AdapterLimits) -> Uploads:
        """The upload service of the routes."""
        return Uploads(database, self.parts, self.local, lifecycle, self._limits, adapter_limits)

    def cleaner(self, database: Database) -> UploadCleanup:
        """The cleanup of uploads; the gateway runs its `run` as a task."""
        return UploadCleanup(database, self.parts, self.local)


def s3_options(settings: Settings) -> S3Options | None:
    """The bucket's options; None if only the data directory is used. Raises `SettingsError`."""
    if settings.blob_store == "local":
        return None
    if settings.s3_bucket is None:
        raise SettingsError("setting `s3_bucket` (LORAPLEX_S3_BUCKET): missing, but `blob_store` is s3")
    key_id, secret = settings.s3_access_key_id, settings.s3_secret_access_key
    if (key_id is None) != (secret is None):
        raise SettingsError(
            "settings `s3_access_key_id` and `s3_secret_access_key`: one is given without the other"
        )
    return S3Options(
        bucket=settings.s3_bucket,
        endpoint=settings.s3_endpoint,
        region=settings.s3_region,
        prefix=settings.s3_prefix,
        access_key_id=None if key_id is None else key_id.get_secret_value(),
        secret_access_key=None if secret is None else secret.get_secret_value(),
    )


def copy_limits(settings: Settings) -> LocalCacheConfig:
    return LocalCacheConfig(
        max_bytes=settings.adapter_disk_bytes, in_use_s=settings.total_timeout_s + COPY_MARGIN_SECONDS
    )


def upload_limits(settings: Settings) -> UploadConfig:
    return UploadConfig(
        part_bytes=settings.upload_part_bytes,
        expiry_s=settings.upload_expiry_s,
        max_open=settings.max_open_uploads,
        max_in_flight=settings.max_uploads_in_flight,
        max_in_flight_per_tenant=max(1, settings.max_uploads_in_flight // 4),
        stall_s=settings.upload_stall_s,
        body_s=settings.upload_body_s,
        storage_floor_bytes=settings.storage_floor_bytes,
    )
