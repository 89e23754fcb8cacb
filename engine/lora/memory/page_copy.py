"""Copies an adapter's pages from its blob into the arena, a few megabytes at a time on a stream of its own.

Invariant: the step loop never waits. Copies run after the kernels that may still read their target pages, and the end of a
copy is polled, never awaited.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from loraplex.engine.lora.memory.packed_adapter import PackedAdapter
from loraplex.engine.lora.memory.slab_allocator import Allocation
from loraplex.engine.lora.memory.slot_tables import Contents

BATCH_BYTES = 4 << 20
"""About a slab of an 8B model. Larger copies are no faster; each one costs a call and the interpreter's lock."""
PART_ALIGNMENT = 256
BATCHES_IN_FLIGHT = 3
"""Batches queued at once: a step's own small copies wait behind at most these (12 MiB, 0.2 ms)."""


Span: TypeAlias = tuple[int, int, int]
"""First byte of the source, first byte of the target, number of bytes."""


class Mark(Protocol):
    """A point in a stream's work."""

    def is_reached(self) -> bool: ...

    def wait(self) -> None: ...


class CopyStream(Protocol):
    """Copies in order, in parallel with the device's computations."""

    def computed(self) -> Mark | None:
        """Return a mark after the work that the calling thread has launched; None where copies need not wait for it."""
        ...

    def start_after(self, mark: Mark | None) -> None:
        """Make later copies start after `mark`."""
        ...

    def copy(self, target: Tensor, source: Tensor, spans: Iterable[Span]) -> None:
        """Copy bytes of one tensor to the other."""
        ...

    def mark(self) -> Mark: ...


class PageCopy:
    """A copy in progress. `starts[i]` is the target of page i in `storage`, uint8 like the blob. `describe` makes
    `contents` of `starts`.
    """

    def __init__(
        self,
        packed: PackedAdapter,
        allocation: Allocation,
        storage: Tensor,
        after: Mark | None,
        describe: Callable[[PackedAdapter, Sequence[int]], Contents],
    ) -> None:
        free = {size: iter(offsets) for size, offsets in allocation.offsets.items()}
        self.packed = packed
        self.storage = storage
        self.after = after
        self.starts = [next(free[page.nbytes]) for page in packed.pages]
        self._describe = describe
        self._contents: Contents | None = None
        self._last: Mark | None = None
        self._error: BaseException | None = None

    def batches(self) -> Iterator[list[Span]]:
        """Yield copies of at most `BATCH_BYTES` together; pages that are adjacent on both sides are copied as one."""
        batch: list[Span] = []
        room = BATCH_BYTES
        for span in _joined(self.packed, self.starts):
            for part in _divided(span):
                if batch and part[2] > room:
                    yield batch
                    batch, room = [], BATCH_BYTES
                batch.append(part)
                room -= part[2]
        if batch:
            yield batch

    @property
    def contents(self) -> Contents:
        """Return what to install, once all pages have arrived. Raises `RuntimeError` before."""
        if self._contents is None:
            raise RuntimeError("an adapter is installed before it has come")
        return self._contents

    def issued(self, last: Mark) -> None:
        """Record that all copies are queued; the adapter has arrived when `last` is reached."""
        self._contents = self._describe(self.packed, self.starts)
        self._last = last

    def fail(self, error: BaseException) -> None:
        self._error = error

    def is_done(self) -> bool:
        """Whether the copy has ended. Raises its error: a device that cannot copy is broken, and so is its engine."""
        if self._error is not None:
            raise RuntimeError("an adapter could not be copied to the device") from self._error
        return self._last is not None and self._last.is_reached()


def copy_pages(stream: CopyStream, copy: PageCopy) -> None:
    """Queue all copies of an adapter, at most `BATCHES_IN_FLIGHT` batches at once.

    Waits for the device, so never call it in the step loop.
    """
    marks: deque[Mark] = deque()
    stream.start_after(copy.after)
    for batch in copy.batches():
        if len(marks) == BATCHES_IN_FLIGHT:
            marks.popleft().wait()
        stream.copy(copy.storage, copy.packed.blob, batch)
        marks.append(stream.mark())
    copy.issued(marks[-1] if marks else stream.mark())


class CopyThread:
    """One thread that issues copies to `stream` in the order they were started."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self._copies: SimpleQueue[PageCopy | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="adapter-copier", daemon=True)
        self._thread.start()

    def start(self, copy: PageCopy) -> None:
        self._copies.put(copy)

    def close(self) -> None:
        self._copies.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._issue_next():
            pass

    def _issue_next(self) -> bool:
        """Issue one adapter's copies; False at the end. A call of its own, so that no blob stays referenced until the next
        one.
        """
        copy = self._copies.get()
        if copy is None:
            return False
        try:
            copy_pages(self._stream, copy)
        except Exception as error:  # noqa: BLE001 - raised in the step loop, which asks for the copy
            copy.fail(error)
        return True


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_reached(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class CudaCopyStream:
    """A side stream of one device. Sources are pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def computed(self) -> Mark | None:
        return self._recorded(torch.cuda.current_stream(self._device))

    def start_after(self, mark: Mark | None) -> None:
        if isinstance(mark, _CudaMark):
            self._stream.wait_event(mark.event)

    def copy(self, target: Tensor, source: Tensor, spans: Iterable[Span]) -> None:
        with torch.cuda.stream(self._stream):
            for begin, to, nbytes in spans:
                target[to : to + nbytes].copy_(source[begin : begin + nbytes], non_blocking=True)

    def mark(self) -> Mark:
        return self._recorded(self._stream)

    def _recorded(self, stream: torch.cuda.Stream) -> Mark:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return _CudaMark(event)


def _joined(packed: PackedAdapter, starts: Sequence[int]) -> Iterator[Span]:
    """Join pages that are adjacent in the blob and in the arena."""
    source, target, nbytes = 0, 0, 0
    for page, start in zip(packed.pages, starts, strict=True):
        if source + nbytes == page.start and target + nbytes == start:
            nbytes += page.nbytes
            continue
        if nbytes:
            yield source, target, nbytes
        source, target, nbytes = page.start, start, page.nbytes
    if nbytes:
        yield source, target, nbytes


def _divided(span: Span) -> Iterator[Span]:
    """Divide a span into parts of at most `BATCH_BYTES`, of about one size."""
    source, target, nbytes = span
    parts = -(-nbytes // BATCH_BYTES)
    step = -(-nbytes // (parts * PART_ALIGNMENT)) * PART_ALIGNMENT
    for begin in range(0, nbytes, step):
        yield source + begin, target + begin, min(step, nbytes - begin)
