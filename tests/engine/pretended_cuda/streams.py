"""Streams, events and graphs of the pretended device: everything runs at once, and what orders it is kept in clocks.

Invariant: an operation that would only be queued on a GPU is ordered by nothing but its stream, the events it waits for and
what its thread has waited for.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import count
from typing import Any
from weakref import WeakSet

import torch
from tests.engine.pretended_cuda.findings import DeviceError, Findings
from tests.engine.pretended_cuda.ordering import Clock, Ordering, join

CUDA = torch.device("cuda", 0)
_numbers = count(1)


class Event:
    """A point in a stream's work. Never recorded, it is reached."""

    def __init__(self, **_: Any) -> None:
        self.clock: Clock = {}
        self.capture: Capture | None = None

    def record(self, stream: "Stream | None" = None) -> None:
        stream = stream or device().current
        self._record_again(stream)
        self.capture = device().capture_of(stream)
        device().taped(lambda: self._record_again(stream))

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or device().current).wait_event(self)

    def query(self) -> bool:
        self._on_host("query")
        device().ordering.host_waited(self.clock)
        return True

    def synchronize(self) -> None:
        """What the engine waits for by name is no implicit wait."""
        self._on_host("synchronize")
        device().ordering.host_waited(self.clock)

    def _record_again(self, stream: "Stream") -> None:
        with device().ordering.lock:
            self.clock = dict(stream.clock)

    def _on_host(self, name: str) -> None:
        device().host_call(f"an event's {name}")
        if self.capture is not None:
            raise DeviceError(f"{name} of an event that a capture recorded")


class Stream:
    """Work in order. `of`: the device, which is this one."""

    def __init__(self, of: object = None, **_: Any) -> None:
        self.device = CUDA
        self.cuda_stream = next(_numbers)
        self.name = f"stream {self.cuda_stream}"
        self.clock: Clock = {}
        device().streams.add(self)

    def wait_event(self, event: Event) -> None:
        capture = device().capturing
        if event.capture is not capture and (event.capture or device().capture_of(self)) and event.clock:
            raise DeviceError("a wait between a capture and what is outside of it")
        if capture is not None:
            capture.streams.add(self)
        self._join(event)
        device().taped(lambda: self._join(event))

    def _join(self, event: Event) -> None:
        with device().ordering.lock:
            join(self.clock, event.clock)

    def wait_stream(self, other: "Stream") -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        device().host_call("a stream's synchronize")
        device().findings.wait("a stream's synchronize")
        device().ordering.host_waited(self.clock)


class Capture:
    """What a graph is made of: operations, launches and events, each on the stream it was captured on."""

    def __init__(self, stream: Stream) -> None:
        self.thread = threading.get_ident()
        self.stream = stream
        self.streams = {stream}
        self.tape: list[Callable[[], None]] = []

    @contextmanager
    def streams_of_its_own(self) -> Iterator[None]:
        """A graph's branches are no streams: nothing orders them but its own events and the stream that it runs on."""
        kept = [(stream, stream.name, stream.clock) for stream in self.streams]
        number = next(_numbers)
        for stream in self.streams:
            stream.name, stream.clock = f"{stream.name} of graph {number}", {}
        try:
            yield
        finally:
            for stream, name, clock in kept:
                stream.name, stream.clock = name, clock


class Graph:
    """Runs its tape again, at the addresses of the capture."""

    def __init__(self) -> None:
        self.capture: Capture | None = None

    def replay(self) -> None:
        if self.capture is None:
            raise DeviceError("a graph is replayed that was never captured")
        current, root = device().current, self.capture.stream
        with self.capture.streams_of_its_own():
            # The nodes follow what the launching stream has done, and it goes on after all of them.
            root.clock = dict(current.clock)
            for step in self.capture.tape:
                step()
            with device().ordering.lock:
                join(current.clock, root.clock)


class StreamState:
    """The streams of each thread, and the capture that one thread may be in."""

    def __init__(self, findings: Findings, ordering: Ordering) -> None:
        self.findings = findings
        self.ordering = ordering
        self.streams: WeakSet[Stream] = WeakSet()
        self._local = threading.local()
        self._capture: Capture | None = None

    @property
    def current(self) -> Stream:
        """The calling thread's stream."""
        return getattr(self._local, "stream", None) or self.default

    @cached_property
    def default(self) -> Stream:
        """The stream of a thread that has chosen none."""
        return Stream()

    @property
    def capturing(self) -> Capture | None:
        """The capture that the calling thread is in."""
        capture = self._capture
        return capture if capture is not None and capture.thread == threading.get_ident() else None

    def capture_of(self, stream: Stream) -> Capture | None:
        """The capture that this stream's work goes to."""
        capture = self.capturing
        return capture if capture is not None and stream in capture.streams else None

    def taped(self, again: Callable[[], None]) -> None:
        """Keep it for replays, during a capture."""
        if (capture := self.capturing) is not None:
            capture.tape.append(again)

    def host_call(self, name: str) -> None:
        """A call that no capturing thread may make. Raises `DeviceError`."""
        if self.capturing is not None:
            raise DeviceError(f"{name} during a capture")

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """As `torch.cuda.stream`."""
        before = self.current
        self._local.stream = stream or before
        try:
            yield
        finally:
            self._local.stream = before

    @contextmanager
    def captured(self, graph: Graph, stream: Stream) -> Iterator[None]:
        """As `torch.cuda.graph`. Raises `DeviceError` if work on another stream is not joined at the end."""
        if self._capture is not None:
            raise DeviceError("two captures at once")
        capture = self._capture = graph.capture = Capture(stream)
        try:
            with self.on(stream):
                yield
            for other in capture.streams:
                if other.clock.get(other.name, 0) > stream.clock.get(other.name, 0):
                    raise DeviceError(
                        f"a capture ends with work that its stream does not wait for: {other.name}"
                    )
        finally:
            self._capture = None


_device: list[StreamState] = []


def device() -> StreamState:
    """The device in use."""
    return _device[-1]


@contextmanager
def in_use(state: StreamState) -> Iterator[None]:
    """Streams and events are those of this device, within."""
    _device.append(state)
    try:
        yield
    finally:
        _device.pop()
