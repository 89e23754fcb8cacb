"""Encrypts (Fernet) suites, answers and reports: they hold what a tenant's users write.

Each has its own encryption key, derived from the server secret, the tenant and the row it belongs to.
"""

import zlib
from typing import Final
from uuid import UUID

from cryptography.fernet import Fernet, InvalidToken

from loraplex.tenants.errors import ContentUnreadable
from loraplex.tenants.stored_responses import DeriveKey, fernet_of

DOMAIN: Final = b"loraplex/evaluation/v1"
NO_TENANT: Final = UUID(int=0)
"""That of the installation's own suites."""


class EncryptedContents:
    """Compresses and encrypts what belongs to the row `owner` of a tenant."""

    def __init__(self, derive_key: DeriveKey) -> None:
        self._derive_key = derive_key

    def encrypt(self, tenant_id: UUID | None, owner: UUID, content: bytes) -> bytes:
        """Return what `decrypt` reads, for the same tenant and owner."""
        return self._fernet(tenant_id, owner).encrypt(zlib.compress(content))

    def decrypt(self, tenant_id: UUID | None, owner: UUID, encrypted: bytes) -> bytes:
        """Return the content. Raises `ContentUnreadable` when the server secret has changed since."""
        try:
            return zlib.decompress(self._fernet(tenant_id, owner).decrypt(encrypted))
        except InvalidToken as error:
            raise ContentUnreadable("it was encrypted with another server secret") from error

    def _fernet(self, tenant_id: UUID | None, owner: UUID) -> Fernet:
        return fernet_of(self._derive_key, DOMAIN, (tenant_id or NO_TENANT).bytes, owner.bytes)
