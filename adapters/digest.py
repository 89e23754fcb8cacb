"""The content digest of an adapter: equal exactly for the same bytes and the same base model."""

import hashlib
import struct

_DOMAIN = b"loraplex adapter 1"


def adapter_digest(canonical_config: bytes, weights_sha256: bytes, base_model_digest: str) -> str:
    """Return 64 hex digits. Each part is preceded by its length, so different lists of parts never hash the same
    bytes.
    """
    digest = hashlib.sha256()
    for part in (_DOMAIN, canonical_config, weights_sha256, base_model_digest.encode()):
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.hexdigest()
