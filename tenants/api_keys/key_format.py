"""The text of an API key: `lpx_<live|test|op>_<key id>_<secret>_<crc>`. Invariant: a mistyped key is refused by its CRC-32
without any I/O; the secret (256 bits) exists only in the text and its SHA-256.
"""

import hashlib
import hmac
import re
import secrets
import string
import zlib
from dataclasses import dataclass, field

from loraplex.tenants.errors import MalformedKey

ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
KEY_ID_LENGTH = 16
SECRET_BYTES = 32
SECRET_LENGTH = 43
CHECKSUM_LENGTH = 6
MAX_LENGTH = 100
PATTERN = re.compile(
    rf"lpx_(live|test|op)_([0-9A-Za-z]{{{KEY_ID_LENGTH}}})_([0-9A-Za-z]{{{SECRET_LENGTH}}})_([0-9A-Za-z]{{{CHECKSUM_LENGTH}}})"
)


@dataclass(frozen=True)
class ParsedKey:
    """A key with a valid checksum. `repr` hides its secret."""

    environment: str
    key_id: str
    secret: str = field(repr=False)

    @property
    def secret_sha256(self) -> bytes:
        return hashlib.sha256(self.secret.encode("ascii")).digest()

    @property
    def plaintext(self) -> str:
        body = f"lpx_{self.environment}_{self.key_id}_{self.secret}"
        return f"{body}_{checksum(body)}"

    def matches(self, secret_sha256: bytes) -> bool:
        """Compares digests in constant time."""
        return hmac.compare_digest(self.secret_sha256, secret_sha256)


def generate_key(environment: str) -> ParsedKey:
    key_id = "".join(secrets.choice(ALPHABET) for _ in range(KEY_ID_LENGTH))
    secret = base62(int.from_bytes(secrets.token_bytes(SECRET_BYTES)), SECRET_LENGTH)
    return ParsedKey(environment, key_id, secret)


def parse_key(text: str) -> ParsedKey:
    """Raises `MalformedKey`; its message never contains the text."""
    match = PATTERN.fullmatch(text) if len(text) <= MAX_LENGTH else None
    if match is None:
        raise MalformedKey("an API key looks like lpx_<live|test|op>_<key id>_<secret>_<checksum>")
    environment, key_id, secret, crc = match.groups()
    if crc != checksum(text[: -CHECKSUM_LENGTH - 1]):
        raise MalformedKey("the API key's checksum does not match: it is mistyped or cut off")
    return ParsedKey(environment, key_id, secret)


def is_key_id(text: str) -> bool:
    return len(text) == KEY_ID_LENGTH and text.isascii() and text.isalnum()


def checksum(body: str) -> str:
    return base62(zlib.crc32(body.encode("ascii")), CHECKSUM_LENGTH)


def base62(number: int, length: int) -> str:
    """`number` in base 62, padded with zeros to `length` characters."""
    digits = []
    for _ in range(length):
        number, digit = divmod(number, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return "".join(reversed(digits))
