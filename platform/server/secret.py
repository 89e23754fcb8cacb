"""The server secret and the keys derived from it: generated once (mode 0600), never logged, never sent anywhere.

Derivation is HMAC-SHA256 (RFC 2104) over typed, length-prefixed parts, so no two inputs share an encoding.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from loraplex.adapters.storage.durable_files import sync_folder, write_private
from loraplex.platform.startup_errors import SettingsError

SECRET_FILE = "server.secret"
MIN_SECRET_BYTES = 16
NAMESPACE_DOMAIN = b"loraplex/tenant-namespace/v1"
FINGERPRINT_DOMAIN = b"loraplex/fingerprint/v1"


def server_secret(configured: str | None, data_dir: Path) -> bytes:
    """The configured secret, else the one in `data_dir`, generated on first use. Raises `SettingsError` if too short."""
    known = known_secret(configured, data_dir)
    if known is not None:
        return known
    path = data_dir / SECRET_FILE
    _create(path)
    return _long_enough(path.read_bytes().strip(), str(path))


def known_secret(configured: str | None, data_dir: Path) -> bytes | None:
    """The configured secret, else the one in `data_dir`; None if there is none yet. Raises `SettingsError` if too short."""
    if configured is not None:
        return _long_enough(configured.strip().encode(), "LORAPLEX_SECRET")
    path = data_dir / SECRET_FILE
    return _long_enough(path.read_bytes().strip(), str(path)) if path.exists() else None


def fingerprint(secret: bytes) -> bytes:
    """What the database may know of a secret: it tells two secrets apart, and nothing of either."""
    return derive(secret, FINGERPRINT_DOMAIN)


def tenant_namespace(secret: bytes, tenant_id: str) -> bytes:
    """The 32-byte cache namespace of a tenant: unguessable without the secret, stable as long as the secret is."""
    return derive(secret, NAMESPACE_DOMAIN, tenant_id.encode())


def derive(secret: bytes, *parts: bytes) -> bytes:
    """Derive 32 bytes from `secret` and `parts`; the first part names the purpose."""
    message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.new(secret, message, hashlib.sha256).digest()


def _create(path: Path) -> None:
    """Write a fresh secret whole or not at all; of two processes that race, the first wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    write_private(draft, f"{secrets.token_urlsafe(48)}\n".encode())
    try:
        os.link(draft, path)
    except FileExistsError:
        return
    finally:
        draft.unlink()
    sync_folder(path.parent)


def _long_enough(secret: bytes, name: str) -> bytes:
    if len(secret) < MIN_SECRET_BYTES:
        raise SettingsError(
            f"{name}: the secret has {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed"
        )
    return secret
