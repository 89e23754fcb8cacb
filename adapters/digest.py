"""An adapter's identity is its content: the same bytes for the same base model, the same digest, and only then."""

import hashlib
import struct

_DOMAIN = b"loraplex adapter 1"


def adapter_digest(canonical_config: bytes, weights_sha256: bytes, base_model_digest: str) -> str:
    """64 hex digits. Every part carries its length, so that no two lists of parts read the same."""
    digest = hashlib.sha256()
    for part in (_DOMAIN, canonical_config, weights_sha256, base_model_digest.encode()):
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.hexdigest()
