"""`OwnFilesValidation`: validates files of this installation itself, such as the demo's adapters, in this process.

Invariant: it never reads what a tenant or an operator sent; that takes a process of its own, which may be refused.
"""

from collections.abc import Mapping
from pathlib import Path
from uuid import UUID

from loraplex.adapters.limits import DEFAULT_LIMITS
from loraplex.adapters.storage.threads import on_thread
from loraplex.adapters.target_modules import AdaptableModule
from loraplex.adapters.validation.result import ValidationResult
from loraplex.adapters.validation.validate import validate_folder


class OwnFilesValidation:
    """`modules` are those of `adaptable_modules`."""

    def __init__(self, modules: Mapping[str, AdaptableModule], base_model_digest: str) -> None:
        self._modules = modules
        self._base_model_digest = base_model_digest

    async def validate(self, tenant_id: UUID, folder: Path) -> ValidationResult:
        """Validate a folder that no other process changes."""
        return await on_thread(
            validate_folder, folder, self._modules, self._base_model_digest, DEFAULT_LIMITS
        )
