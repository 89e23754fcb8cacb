"""Encrypts (Fernet) the secrets of webhook endpoints: they sign, so that they cannot be stored as digests.

Each endpoint has its own encryption key, derived from the server secret, the tenant and the endpoint. A secret that is moved
to another row cannot be decrypted there.
"""

from uuid import UUID

from cryptography.fernet import Fernet, InvalidToken

from loraplex.tenants.errors import WebhookSecretUnreadable
from loraplex.tenants.stored_responses import DeriveKey, fernet_of

DOMAIN = b"loraplex/webhook/v1"


class WebhookSecrets:
    """Encrypts and decrypts the secrets of endpoints."""

    def __init__(self, derive_key: DeriveKey) -> None:
        self._derive_key = derive_key

    def encrypt(self, tenant_id: UUID, endpoint_id: UUID, secret: str) -> bytes:
        return self._fernet(tenant_id, endpoint_id).encrypt(secret.encode())

    def decrypt(self, tenant_id: UUID, endpoint_id: UUID, encrypted: bytes) -> str:
        """Return the secret. Raises `WebhookSecretUnreadable` when the server secret has changed since."""
        try:
            return self._fernet(tenant_id, endpoint_id).decrypt(encrypted).decode()
        except InvalidToken as error:
            raise WebhookSecretUnreadable(
                "the secret of this endpoint can no longer be read: rotate it without grace"
            ) from error

    def _fernet(self, tenant_id: UUID, endpoint_id: UUID) -> Fernet:
        return fernet_of(self._derive_key, DOMAIN, tenant_id.bytes, endpoint_id.bytes)
