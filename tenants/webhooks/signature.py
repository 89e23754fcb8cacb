"""Signs messages as Standard Webhooks 1.0 says. Invariant: a signature covers id, time and the exact bytes of the body."""

import base64
import hmac
import secrets
from collections.abc import Sequence
from typing import Final

SECRET_PREFIX: Final = "whsec_"
SECRET_BYTES: Final = 32
MIN_SECRET_BYTES: Final = 24


def new_secret() -> str:
    """Generate a secret: `whsec_` and 256 random bits in base64."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def is_secret(text: str) -> bool:
    """Whether the text is a secret that signs: `whsec_` and at least `MIN_SECRET_BYTES` in base64."""
    try:
        key = base64.b64decode(text.removeprefix(SECRET_PREFIX), validate=True)
    except ValueError:
        return False
    return text.startswith(SECRET_PREFIX) and len(key) >= MIN_SECRET_BYTES


def signed_headers(
    signing_secrets: Sequence[str], message_id: str, timestamp: int, body: bytes
) -> dict[str, str]:
    """Build the three headers, with one signature for each secret. `timestamp` in seconds since 1970."""
    content = f"{message_id}.{timestamp}.".encode() + body
    signatures = (_signature(secret, content) for secret in signing_secrets)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(signatures),
    }


def _signature(secret: str, content: bytes) -> str:
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    return f"v1,{base64.b64encode(hmac.digest(key, content, 'sha256')).decode()}"
