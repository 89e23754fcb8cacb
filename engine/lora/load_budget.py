"""`LoadBudget`: adapter loads in progress, in bytes and seconds: how many may start, and what each costs.

Invariant: sizes and rates are measured; the mean of the known sizes stands for an adapter whose size is unknown.
"""

from cachetools import LRUCache

from loraplex.engine.messages import AdapterKey

SMOOTHING = 0.2
"""Weight of the newest load: if one disk read in five is slow the price changes, if one in fifty is it hardly does."""


class Throughput:
    """An exponential mean of seconds per byte, weighted by bytes: small adapters say little of a rate."""

    def __init__(self, bytes_per_second: float) -> None:
        """`bytes_per_second` is used until a load is measured."""
        self._bytes = bytes_per_second
        self._seconds = 1.0
        self._measured = False

    @property
    def bytes_per_second(self) -> float:
        return self._bytes / self._seconds

    def note(self, nbytes: int, seconds: float) -> None:
        """Record that a load of `nbytes` took `seconds`."""
        if nbytes <= 0 or seconds < 0:
            return
        weight = SMOOTHING if self._measured else 1.0
        self._bytes += weight * (nbytes - self._bytes)
        self._seconds += weight * (max(seconds, 1e-9) - self._seconds)
        self._measured = True

    def seconds(self, nbytes: float) -> float:
        """Return the expected seconds of a load of `nbytes`."""
        return nbytes / self.bytes_per_second


LOADS_AT_FIRST = 4
"""Loads that fill the budget while no size is known yet."""

MAX_SIZES = 65_536
"""Adapters whose size is remembered."""

SOURCE_RATE = 1e9
DEVICE_RATE = 2e10
"""Bytes per second until they are measured: a disk, and a PCIe link."""


class LoadBudget:
    """Bounds the loads in progress, among them what is read and finds no room on the device.

    A tenant may have half of `max_bytes` in progress, and one load in any case unless all of them take more than `max_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._mean = max_bytes / LOADS_AT_FIRST
        self._sizes: LRUCache[AdapterKey, int] = LRUCache(MAX_SIZES)
        self._under_way: dict[AdapterKey, float] = {}
        self._bytes = 0.0
        self.source = Throughput(SOURCE_RATE)
        self.device = Throughput(DEVICE_RATE)

    def has_room(self, namespace: bytes) -> bool:
        """Whether a tenant may start one more load, of the mean size. O(loads in progress)."""
        own = [nbytes for key, nbytes in self._under_way.items() if key[0] == namespace]
        if not own:
            return self._bytes <= self._max_bytes
        return self._bytes + self._mean <= self._max_bytes and sum(own) + self._mean <= self._max_bytes / 2

    def begin(self, key: AdapterKey) -> None:
        """Record the start of a load."""
        self._under_way[key] = self._size(key)
        self._bytes += self._under_way[key]

    def learn(self, key: AdapterKey, nbytes: int) -> None:
        """Record an adapter's size."""
        first = not self._sizes
        self._sizes[key] = nbytes
        self._mean = float(nbytes) if first else self._mean + 0.1 * (nbytes - self._mean)
        if key in self._under_way:
            self._bytes += nbytes - self._under_way[key]
            self._under_way[key] = nbytes

    def known_size(self, key: AdapterKey) -> int:
        """Return an adapter's size in bytes; 0 if it is unknown."""
        return self._sizes.get(key, 0)

    def end(self, key: AdapterKey) -> None:
        """Record the end of a load, whatever its outcome."""
        self._bytes -= self._under_way.pop(key, 0.0)

    def seconds(self, key: AdapterKey, *, reads: bool) -> float:
        """Return the expected seconds of this adapter's load: from the source if it `reads`, else from host memory."""
        nbytes = self._size(key)
        return self.device.seconds(nbytes) + (self.source.seconds(nbytes) if reads else 0.0)

    def _size(self, key: AdapterKey) -> float:
        return self._sizes.get(key, self._mean)
