"""Chained, keyed hashes of KV blocks (BLAKE2b, RFC 7693): a block's digest covers every token before its end."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 32


class HashChain:
    """The block digests of one sequence, each computed once. Grows as blocks fill up."""

    __slots__ = ("_block_size", "_digests", "_key", "_root", "namespace")

    def __init__(self, key: bytes, root: bytes, block_size: int, namespace: bytes) -> None:
        self.namespace = namespace
        self._key = key
        self._root = root
        self._block_size = block_size
        self._digests: list[bytes] = []

    @property
    def root(self) -> bytes:
        return self._root

    def digest(self, index: int, token_ids: Sequence[int]) -> bytes:
        """Digest of block `index`; `token_ids` must cover it and agree with earlier calls."""
        digests, size = self._digests, self._block_size
        while len(digests) <= index:
            start = len(digests) * size
            parent = digests[-1] if digests else self._root
            packed = array("I", token_ids[start : start + size]).tobytes()
            digests.append(keyed_hash(self._key, b"block", parent + packed))
        return digests[index]

    def fork(self, num_blocks: int) -> "HashChain":
        """A chain that shares the first `num_blocks` digests."""
        other = HashChain(self._key, self._root, self._block_size, self.namespace)
        other._digests = self._digests[:num_blocks]
        return other


def keyed_hash(key: bytes, kind: bytes, data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES, key=key, person=kind).digest()
