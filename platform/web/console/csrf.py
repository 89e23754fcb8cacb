"""CSRF tokens as pages carry them.

Invariant: a token is written differently on each page, so that the lengths of compressed pages do not reveal it (BREACH).
"""

import binascii
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from secrets import token_bytes


def masked(token: str) -> str:
    """Write the token of a session for one page."""
    plain = token.encode()
    pad = token_bytes(len(plain))
    return urlsafe_b64encode(pad + _xor(pad, plain)).decode()


def is_token(text: str | None, token: str) -> bool:
    """Return whether `text` is the session's token as some page carried it."""
    try:
        sent = urlsafe_b64decode(text or "")
    except (binascii.Error, ValueError):
        return False
    middle = len(sent) // 2
    return len(sent) % 2 == 0 and hmac.compare_digest(_xor(sent[:middle], sent[middle:]), token.encode())


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))
