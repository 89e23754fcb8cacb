"""`PinnedArena`: host memory for blobs, pinned once at the start. Pinning later would block the driver, and so every row.

Invariant: an extent returns when the last reference to its blob is gone, so that a blob is never overwritten during a copy.
"""

import threading
import weakref
from bisect import insort
from queue import SimpleQueue

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 30
"""Chunks are powers of two, since torch's allocator of pinned memory rounds up to those; a blob lies in one chunk."""


class PinnedArena:
    """At most `max_bytes`, in chunks of at most `chunk_bytes`. First fit. Any thread may allocate and free."""

    def __init__(self, max_bytes: int, *, pinned: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        chunk = min(chunk_bytes, 1 << (max_bytes.bit_length() - 1)) if max_bytes > 0 else 1
        count = max(0, max_bytes) // chunk
        self._chunks = [torch.empty(chunk, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]
        self._bases = {tensor.data_ptr() for tensor in self._chunks}
        self._free: list[list[tuple[int, int]]] = [[(0, chunk)] for _ in self._chunks]
        # A finalizer may append here at any moment, even while a thread has the lock.
        self._returned: SimpleQueue[tuple[int, int, int]] = SimpleQueue()
        self._lock = threading.Lock()
        self.pinned = pinned
        self.longest = chunk if count else 0
        self.capacity_bytes = chunk * count

    def owns(self, blob: Tensor) -> bool:
        """Whether `allocate` returned this blob."""
        return blob.untyped_storage().data_ptr() in self._bases

    def allocate(self, nbytes: int) -> Tensor | None:
        """Return uint8 [nbytes], or None when no free extent is long enough."""
        size = max(1, nbytes)
        with self._lock:
            self._take_returned()
            for number, extents in enumerate(self._free):
                for place, (start, length) in enumerate(extents):
                    if length >= size:
                        extents[place : place + 1] = [(start + size, length - size)] if length > size else []
                        return self._blob(number, start, size, nbytes)
        return None

    def _blob(self, number: int, start: int, size: int, nbytes: int) -> Tensor:
        blob = self._chunks[number][start : start + nbytes]
        weakref.finalize(blob, self._returned.put, (number, start, size)).atexit = False
        return blob

    def _take_returned(self) -> None:
        while not self._returned.empty():
            number, start, size = self._returned.get()
            extents = self._free[number]
            insort(extents, (start, size))
            place = extents.index((start, size))
            self._join(extents, place)
            self._join(extents, place - 1)

    def _join(self, extents: list[tuple[int, int]], place: int) -> None:
        """Join an extent with the next one when they touch."""
        if 0 <= place < len(extents) - 1:
            (start, size), (following, length) = extents[place : place + 2]
            if start + size == following:
                extents[place : place + 2] = [(start, size + length)]
