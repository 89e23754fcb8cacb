"""Which accesses to memory are ordered: a vector clock per stream and thread, and the last accesses of every byte.

Source: C. Fidge, "Timestamps in message-passing systems that preserve the partial ordering" (1988); C. Flanagan and
S. Freund, "FastTrack: efficient and precise dynamic race detection" (PLDI 2009).

Invariant: memory of the device and pinned memory is known by its storage, as long as that lives. An address that none
holds is an access that a GPU would not survive.
"""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tests.engine.pretended_cuda.findings import DeviceError, Findings
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

Clock: TypeAlias = dict[str, int]
"""Actor -> how many of its operations have happened before."""
HOST = "host"
"""All threads' accesses to pinned memory: locks and queues order them, as they order Python."""


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes [begin, end) of a storage, by operation `tick` of an actor."""

    begin: int
    end: int
    actor: str
    tick: int
    name: str


class StorageRef:
    """Whether a storage still lives, without keeping it."""

    def __init__(self, storage: UntypedStorage) -> None:
        self._reference: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    @property
    def is_freed(self) -> bool:
        return bool(self._reference.expired())


@dataclass(slots=True)
class Region:
    """A storage, and the accesses that later ones must be ordered after."""

    begin: int
    end: int
    storage: StorageRef
    writes: list[Access] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [begin, end) that an operation reads or writes."""

    begin: int
    end: int
    is_write: bool


class Ordering:
    """Clocks and regions of one device. Calls may come from any thread."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self.lock = threading.RLock()
        self._bases: list[int] = []
        self._regions: dict[int, Region] = {}
        self._known = threading.local()
        self._host: Clock = {HOST: 1}

    @property
    def thread_clock(self) -> Clock:
        """What the calling thread has waited for."""
        if not hasattr(self._known, "clock"):
            self._known.clock = {}
        clock: Clock = self._known.clock
        return clock

    def host_waited(self, clock: Clock) -> None:
        """The calling thread knows that everything in `clock` has happened."""
        with self.lock:
            join(self.thread_clock, clock)
            join(self._host, clock)

    def track(self, tensor: Tensor) -> None:
        """Know the storage of a tensor of the device, or of pinned memory."""
        storage = tensor.untyped_storage()
        base, size = storage.data_ptr(), storage.nbytes()
        with self.lock:
            region = self._regions.get(base)
            if region is not None and not region.storage.is_freed and region.end == base + size:
                return
            # Storages that have been freed may lie within.
            first, last = bisect_left(self._bases, base), bisect_left(self._bases, base + max(size, 1))
            for freed in self._bases[first:last]:
                del self._regions[freed]
            self._bases[first:last] = [base]
            self._regions[base] = Region(base, base + size, StorageRef(storage))

    def knows(self, tensor: Tensor) -> bool:
        """Whether a host tensor's storage is the device's, or pinned."""
        region = self._regions.get(tensor.untyped_storage().data_ptr())
        return region is not None and not region.storage.is_freed

    def launched(self, stream: Clock, actor: str, extents: Iterable[Extent], name: str) -> None:
        """An operation of a stream: it follows what the stream has done or waits for, and what the calling thread knows."""
        with self.lock:
            join(stream, self.thread_clock)
            stream[HOST] = self._host[HOST]
            stream[actor] = stream.get(actor, 0) + 1
            for extent in extents:
                self._access(stream, actor, extent, name)

    def host_access(self, extent: Extent, name: str) -> None:
        """The host reads or writes pinned memory."""
        with self.lock:
            self._host[HOST] += 1
            self._access(self._host, HOST, extent, name)

    def _access(self, clock: Clock, actor: str, extent: Extent, name: str) -> None:
        region = self.require(extent.begin, extent.end)
        access = Access(extent.begin, extent.end, actor, clock[actor], name)
        earlier = [*region.writes, *region.reads] if extent.is_write else region.writes
        for other in earlier:
            overlaps = other.begin < access.end and access.begin < other.end
            if overlaps and clock.get(other.actor, 0) < other.tick:
                self._findings.race(f"{name} on {actor} is not ordered after {other.name} on {other.actor}")
        kept = region.writes if extent.is_write else region.reads
        kept[:] = [other for other in kept if not _replaces(access, other)]
        if extent.is_write:
            region.reads[:] = [other for other in region.reads if not _covers(access, other)]
        kept.append(access)

    def require(self, begin: int, end: int) -> Region:
        """The region of these bytes. Raises `DeviceError` if they are of none, or of two."""
        with self.lock:
            place = bisect_right(self._bases, begin) - 1
            region = self._regions[self._bases[place]] if place >= 0 else None
            if region is None or end > region.end or region.storage.is_freed:
                raise DeviceError(f"an illegal memory access at {begin:#x} to {end:#x}")
            return region


def join(clock: Clock, other: Clock) -> None:
    """Let `clock` follow `other`."""
    for actor, tick in other.items():
        if clock.get(actor, 0) < tick:
            clock[actor] = tick


def extent_of(tensor: Tensor, *, is_write: bool) -> Extent | None:
    """The bytes from a host tensor's first to its last element; None without elements."""
    if not tensor.numel():
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return Extent(begin, begin + (last + 1) * tensor.element_size(), is_write)


def _covers(access: Access, other: Access) -> bool:
    return access.begin <= other.begin and other.end <= access.end


def _replaces(access: Access, other: Access) -> bool:
    """Whatever follows `access` follows `other`, too."""
    return other.actor == access.actor and _covers(access, other)
