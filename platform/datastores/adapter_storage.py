"""Storage of adapters: the data directory, or a bucket with copies in the data directory. It needs no database."""

from typing import Final

from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.storage.local_cache import LocalCacheConfig
from loraplex.adapters.storage.local_store import ADAPTERS_FOLDER, LocalAdapterStore
from loraplex.adapters.storage.object_store import ObjectStore, S3Options
from loraplex.platform.config import Settings
from loraplex.platform.startup_errors import SettingsError

OBJECTS_FOLDER: Final = "objects"
COPY_MARGIN_SECONDS: Final = 300.0
"""A copy is kept this much longer than the longest request that may read it."""


class AdapterStorage:
    """`adapters` are the stored adapters, `local` the files that engines read, `objects` the objects below both."""

    def __init__(self, settings: Settings, base_model_digest: str) -> None:
        bucket = s3_options(settings)
        self.objects = ObjectStore(settings.data_dir / OBJECTS_FOLDER, bucket)
        self.local = LocalAdapterStore(settings.data_dir / ADAPTERS_FOLDER)
        self.adapters = BlobStore(
            self.local,
            self.objects if bucket else None,
            base_model_digest,
            copy_limits=LocalCacheConfig(
                max_bytes=settings.adapter_disk_bytes, in_use_s=settings.total_timeout_s + COPY_MARGIN_SECONDS
            ),
        )


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
