"""`HostCache`: adapters that left the device, as the blobs they were loaded as. Least recently used first out.

Invariant: at most `max_bytes` of host memory; an adapter that returns is copied from here, not read from disk.
"""

import threading
from operator import attrgetter

import torch
from cachetools import LRUCache
from torch import Tensor

from loraplex.engine.lora.memory.packed_adapter import PackedAdapter
from loraplex.engine.lora.memory.pinned_arena import PinnedArena
from loraplex.engine.messages import AdapterKey


class HostCache:
    """`max_bytes` 0 keeps nothing. An adapter on the device stays here as well, so that it can leave the device at once.

    With an `arena` blobs are its extents, and only those are kept. The loader allocates blobs, the step loop makes all
    other calls.
    """

    def __init__(self, max_bytes: int, arena: PinnedArena | None = None) -> None:
        self.max_bytes = max_bytes if arena is None else arena.capacity_bytes
        self.num_hits = 0
        self._arena = arena
        self._blobs: LRUCache[AdapterKey, PackedAdapter] = LRUCache(self.max_bytes, attrgetter("blob.nbytes"))
        self._lock = threading.Lock()

    def __contains__(self, key: AdapterKey) -> bool:
        return key in self._blobs

    def __len__(self) -> int:
        return len(self._blobs)

    @property
    def keys(self) -> list[AdapterKey]:
        """The adapters that are kept, least recently used first. The loader may evict some meanwhile, hence the lock."""
        with self._lock:
            return [*self._blobs]

    @property
    def nbytes(self) -> int:
        """Bytes of all blobs."""
        return int(self._blobs.currsize)

    def blob(self, nbytes: int) -> Tensor:
        """Return memory for an adapter to be packed into, evicting others for it.

        The memory lies outside of the arena if there is no arena, if loads in progress take all of it, or if a blob is
        longer than its chunks. A blob that is too long evicts no other and is not kept.
        """
        if self._arena is None:
            return torch.empty(nbytes, dtype=torch.uint8)
        blob = self._arena.allocate(nbytes)
        while blob is None and nbytes <= self._arena.longest and self._drop_oldest():
            blob = self._arena.allocate(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._arena.pinned) if blob is None else blob

    def keep(self, key: AdapterKey, packed: PackedAdapter) -> None:
        """Keep an adapter, and as many of the most recently used ones as there is room for."""
        nbytes = packed.blob.nbytes
        if nbytes > self.max_bytes or (self._arena is not None and not self._arena.owns(packed.blob)):
            return
        with self._lock:
            self._put_last(key, packed)

    def find(self, key: AdapterKey) -> PackedAdapter | None:
        """Return the blob, now the most recently used, or None."""
        with self._lock:
            packed = self._blobs.get(key)
            if packed is not None:
                self.num_hits += 1
                self._put_last(key, packed)
        return packed

    def forget(self, key: AdapterKey) -> None:
        with self._lock:
            self._blobs.pop(key, None)

    def forget_namespace(self, namespace: bytes) -> None:
        for key in [key for key in self._blobs if key[0] == namespace]:
            self.forget(key)

    def _put_last(self, key: AdapterKey, packed: PackedAdapter) -> None:
        """Insert an entry behind all others: a cache is iterated in the order of insertion, which so is that of use."""
        self._blobs.pop(key, None)
        self._blobs[key] = packed

    def _drop_oldest(self) -> bool:
        """Drop the oldest blob; False when the cache is empty. Its extent is free once no copy reads from it either."""
        with self._lock:
            if not self._blobs:
                return False
            self._blobs.popitem()
        return True
