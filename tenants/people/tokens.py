"""Tokens of sessions and links: 256 random bits, of which only the SHA-256 is stored."""

import hashlib
import secrets
from typing import Final

from loraplex.tenants.errors import LinkNotValid

_BYTES: Final = 32
_MAX_LENGTH: Final = 100


def new_token() -> str:
    """Return a new token, in characters of a URL."""
    return secrets.token_urlsafe(_BYTES)


def token_digest(token: str) -> bytes:
    """Return the digest by which a token is found. Raises `LinkNotValid` for a text that is none."""
    if not token.isascii() or not 1 <= len(token) <= _MAX_LENGTH:
        raise LinkNotValid("this is no valid token")
    return hashlib.sha256(token.encode()).digest()
