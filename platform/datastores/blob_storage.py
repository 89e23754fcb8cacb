"""Opens the storage of adapters and uploads: the data directory, or a bucket with copies in the data directory."""

from loraplex.adapters.limits import AdapterLimits, UploadConfig
from loraplex.adapters.uploads.cleanup import UploadCleanup
from loraplex.adapters.uploads.parts import UploadParts
from loraplex.adapters.uploads.service import Uploads
from loraplex.adapters.versions.lifecycle import VersionLifecycle
from loraplex.platform.config import Settings
from loraplex.platform.datastores.adapter_storage import AdapterStorage
from loraplex.tenants.database import Database


class BlobStorage(AdapterStorage):
    """Storage of an installation: `parts` for open uploads besides."""

    def __init__(self, settings: Settings, base_model_digest: str) -> None:
        super().__init__(settings, base_model_digest)
        self.parts = UploadParts(self.objects, settings.storage_floor_bytes)
        self._limits = UploadConfig(storage_floor_bytes=settings.storage_floor_bytes)

    def uploads(
        self, database: Database, lifecycle: VersionLifecycle, adapter_limits: AdapterLimits
    ) -> Uploads:
        """The upload service of the routes."""
        return Uploads(database, self.parts, self.local, lifecycle, self._limits, adapter_limits)

    def cleaner(self, database: Database) -> UploadCleanup:
        """The cleanup of uploads; the gateway runs its `run` as a task."""
        return UploadCleanup(database, self.parts, self.local)
