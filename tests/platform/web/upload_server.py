"""Helpers of the upload tests: a version lifecycle that only accepts folders, on a real database."""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from loraplex.adapters.limits import AdapterLimits, UploadConfig
from loraplex.adapters.storage.local_store import LocalAdapterStore
from loraplex.adapters.storage.object_store import ObjectStore, S3Options
from loraplex.adapters.uploads.parts import UploadParts
from loraplex.adapters.uploads.service import Uploads
from loraplex.adapters.versions.lifecycle import RegisteredVersion, VersionLifecycle, register_folder
from loraplex.adapters.versions.pending_folders import PendingFolders
from loraplex.tenants.database import Database
from loraplex.tenants.unit_of_work import UnitOfWork

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class FakeLifecycle(VersionLifecycle):
    """Makes versions in the state `validating` and keeps their folders; fails with `error`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.taken: list[Path] = []
        self.error: Exception | None = None

    async def register(self, uow: UnitOfWork, tenant_id: UUID, name: str, staged: Path) -> RegisteredVersion:
        registered = await register_folder(uow, tenant_id, PendingFolders(self.root), name, staged)
        if self.error is not None:
            raise self.error
        return registered

    def start(self, registered: RegisteredVersion) -> None:
        self.taken.append(registered.pending.folder)


@dataclass
class UploadHome:
    """A gateway's part of uploads, under `home`."""

    database: Database
    home: Path
    bucket: S3Options | None = None
    limits: UploadConfig = field(default_factory=lambda: UploadConfig(part_bytes=1000))
    max_weights_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        self.storage = LocalAdapterStore(self.home / "adapters")
        self.lifecycle = FakeLifecycle(self.storage.root)
        self.objects = ObjectStore(self.home / "objects", self.bucket)
        self.parts = UploadParts(self.objects, self.limits.storage_floor_bytes)
        self.allow(self.max_weights_bytes)

    def allow(self, max_weights_bytes: int) -> None:
        """From now on adapters may have so many bytes."""
        adapter_limits = AdapterLimits(max_weights_bytes=max_weights_bytes)
        self.uploads = Uploads(
            self.database, self.parts, self.storage, self.lifecycle, self.limits, adapter_limits
        )

    def left(self) -> list[str]:
        """Uploaded files that no version has taken over."""
        folders = (self.home / "adapters" / ".staging", self.home / "objects" / "spool")
        return [str(path) for folder in folders if folder.exists() for path in folder.rglob("*")]

    def taken(self, number: int = -1) -> dict[str, bytes]:
        """The files of a folder that the life cycle got."""
        return {file.name: file.read_bytes() for file in self.lifecycle.taken[number].iterdir()}


def declared(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    return [
        {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    ]


def content_digest(content: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(content).digest()).decode()}:"
