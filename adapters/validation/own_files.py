"""`OwnFilesValidation`: validates files of this installation itself, such as the demo's adapters, in this process.

Invariant: it never reads what a tenant or an operator sent; that takes a process of its own, which may be refused.
"""

from pathlib import Path
from uuid import UUID

from loraplex.adapters.errors import FolderRejected
from loraplex.adapters.limits import DEFAULT_LIMITS
from loraplex.adapters.storage.threads import on_thread
from loraplex.adapters.target_modules import BaseModel
from loraplex.adapters.validation.result import ValidationResult, refused_by
from loraplex.adapters.validation.upload_files import open_upload
from loraplex.adapters.validation.validate import validate_files


class OwnFilesValidation:
    def __init__(self, base: BaseModel) -> None:
        self._base = base

    async def validate(self, tenant_id: UUID, folder: Path) -> ValidationResult:
        """Validate a folder that no other process changes."""
        return await on_thread(self._validate, folder)

    def _validate(self, folder: Path) -> ValidationResult:
        try:
            with open_upload(folder, DEFAULT_LIMITS) as files:
                return validate_files(files, self._base, DEFAULT_LIMITS)
        except FolderRejected as error:
            return refused_by(error)
