"""`HostTier`: adapters that left the device, as the blobs they were loaded as. Least recently used first out.

Invariant: at most `max_bytes` of host memory; whoever comes back from here is copied, not read from disk.
"""

from collections import OrderedDict

from loraplex.engine.lora.packed import PackedAdapter

Key = tuple[bytes, str]


class HostTier:
    """`max_bytes` 0 keeps nothing. An adapter on the device stays in here as well, so that it can leave at once."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.num_hits = 0
        self._kept: OrderedDict[Key, PackedAdapter] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: Key, packed: PackedAdapter) -> None:
        """Keep an adapter, and as many of those used last beside it as there is room for."""
        if packed.host_nbytes > self.max_bytes:
            return
        self.forget(key)
        while self.nbytes + packed.host_nbytes > self.max_bytes:
            self.forget(next(iter(self._kept)))
        self._kept[key] = packed
        self.nbytes += packed.host_nbytes

    def find(self, key: Key) -> PackedAdapter | None:
        """The blob, now the most recently used, or None."""
        packed = self._kept.get(key)
        if packed is not None:
            self._kept.move_to_end(key)
            self.num_hits += 1
        return packed

    def forget(self, key: Key) -> None:
        packed = self._kept.pop(key, None)
        if packed is not None:
            self.nbytes -= packed.host_nbytes
