"""A fleet of replicas in simulated time: rows, a queue, adapters in two memories, a prefix cache, and reports to the routers.

Invariant: a policy learns of a replica by its reports, and by the ends of the requests that it sent there itself.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from time import thread_time
from typing import Final, Protocol

import numpy as np
from tests.benchmarks.placement.traffic import FleetShape, Traffic

READ_BYTES_PER_S: Final = 2e9
COPY_BYTES_PER_S: Final = 20e9
PREFILL_TOKENS_PER_S: Final = 10_000.0
TOKEN_S, TOKEN_ROW_S = 0.020, 0.00025
PREFIXES_IN_CACHE: Final = 64
REPORT_S: Final = (0.5, 1.0)

ARRIVAL, LOADED, END, REPORT = range(4)


class Policy(Protocol):
    """A router's way to choose a replica by number. Each of the fleet's routers has one of its own."""

    def choose(self, adapter: int, prefix: int, share: float) -> int: ...

    def sent(self, replica: int, adapter: int, prefix: int, share: float) -> None: ...

    def ended(self, replica: int, adapter: int) -> None: ...

    def report(self, replica: "Replica") -> None: ...


@dataclass(slots=True)
class Replica:
    """One replica. `device` and `host`: adapters, longest unused first. `users`: running requests of an adapter."""

    number: int
    running: int = 0
    open_requests: int = 0
    queue: deque[int] = field(default_factory=deque)
    device: OrderedDict[int, None] = field(default_factory=OrderedDict)
    host: OrderedDict[int, None] = field(default_factory=OrderedDict)
    device_bytes: int = 0
    host_bytes: int = 0
    users: dict[int, int] = field(default_factory=dict)
    loading: dict[int, list[int]] = field(default_factory=dict)
    load_ends: float = 0.0
    prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)
    changed: bool = True


@dataclass(slots=True)
class Outcome:
    """Of the measured requests: seconds until they had a row and their adapter, and where that was. `decision_s`: CPU time."""

    waits: list[float] = field(default_factory=list)
    device_hits: int = 0
    host_hits: int = 0
    prefix_hits: int = 0
    read_bytes: int = 0
    copied_bytes: int = 0
    decision_s: float = 0.0
    decisions: int = 0

    @property
    def requests(self) -> int:
        """How many were measured and got a row."""
        return len(self.waits)


class Memories:
    """Loads and evicts the adapters of replicas; least recently used first, but none in use."""

    def __init__(self, shape: FleetShape, traffic: Traffic) -> None:
        self._shape = shape
        self._sizes: list[int] = traffic.sizes.tolist()

    def load(self, replica: Replica, adapter: int) -> tuple[int, int]:
        """Put an adapter into both memories; the bytes read from storage, and copied to the device."""
        size = self._sizes[adapter]
        read = 0 if adapter in replica.host else size
        if read:
            replica.host_bytes += size
        replica.host[adapter] = None
        replica.host.move_to_end(adapter)
        while replica.host_bytes > self._shape.host_bytes:
            replica.host_bytes -= self._sizes[replica.host.popitem(last=False)[0]]
        replica.device[adapter] = None
        replica.device_bytes += size
        while replica.device_bytes > self._shape.device_bytes:
            unused = next(each for each in replica.device if not replica.users.get(each) and each != adapter)
            del replica.device[unused]
            replica.device_bytes -= self._sizes[unused]
        replica.changed = True
        return read, size


class Simulation:
    """One run of a policy: arrivals, loads, ends of requests, and reports, in the order of their times."""

    def __init__(self, shape: FleetShape, traffic: Traffic, policies: list[Policy]) -> None:
        self._shape = shape
        self._policies = policies
        self._memories = Memories(shape, traffic)
        self.replicas = [Replica(number) for number in range(shape.replicas)]
        self._events: list[tuple[float, int, int, int]] = []
        self._measured_from = shape.requests // 4
        self.outcome = Outcome()
        self._times: list[float] = traffic.times.tolist()
        self._adapters: list[int] = traffic.adapters.tolist()
        self._prefixes: list[int] = traffic.prefixes.tolist()
        self._routers: list[int] = traffic.routers.tolist()
        self._shares: list[float] = (traffic.prefix_tokens / traffic.prompt_tokens).tolist()
        self._prefix_s: list[float] = (traffic.prefix_tokens / PREFILL_TOKENS_PER_S).tolist()
        self._prompt_s: list[float] = (traffic.prompt_tokens / PREFILL_TOKENS_PER_S).tolist()
        self._outputs: list[int] = traffic.output_tokens.tolist()
        self._random = np.random.default_rng(shape.seed)

    def warm(self, placed: Iterable[tuple[int, int]]) -> None:
        """Put adapters into replicas' memories before the first request: (replica, adapter), the last one used last."""
        for replica, adapter in placed:
            self._memories.load(self.replicas[replica], adapter)

    def run(self) -> Outcome:
        """Serve all requests; the first quarter is not measured."""
        self._schedule_reports()
        pending = self._events
        for request, arrives in enumerate(self._times):
            while pending and pending[0][0] <= arrives:
                self._handle(*heappop(pending))
            self._arrive(arrives, request)
        self._finish()
        return self.outcome

    def _finish(self) -> None:
        """Serve what waits when the last request has come; replicas report no more."""
        while self._events:
            event = heappop(self._events)
            if event[1] != REPORT:
                self._handle(*event)

    def _schedule_reports(self) -> None:
        for replica in self.replicas:
            for policy in self._policies:
                policy.report(replica)
            self._events.append((float(self._random.uniform(0.0, REPORT_S[1])), REPORT, replica.number, 0))
        heapify(self._events)

    def _handle(self, now: float, kind: int, replica: int, what: int) -> None:
        at = self.replicas[replica]
        if kind == END:
            self._end(now, at, what)
        elif kind == LOADED:
            for request in at.loading.pop(what):
                self._enter(now, at, request)
        else:
            for policy in self._policies:
                policy.report(at)
            heappush(self._events, (now + self._random.uniform(*REPORT_S), REPORT, replica, 0))

    def _arrive(self, now: float, request: int) -> None:
        adapter, prefix = self._adapters[request], self._prefixes[request]
        policy, share = self._policies[self._routers[request]], self._shares[request]
        began = thread_time()
        replica = policy.choose(adapter, prefix, share)
        self.outcome.decision_s += thread_time() - began
        self.outcome.decisions += 1
        policy.sent(replica, adapter, prefix, share)
        at = self.replicas[replica]
        at.open_requests += 1
        at.users[adapter] = at.users.get(adapter, 0) + 1
        measured = request >= self._measured_from
        if adapter in at.loading:
            at.loading[adapter].append(request)
        elif adapter in at.device:
            at.device.move_to_end(adapter)
            self.outcome.device_hits += measured
            self._enter(now, at, request)
        else:
            self._load(now, at, adapter, request, measured)

    def _load(self, now: float, at: Replica, adapter: int, request: int, measured: bool) -> None:
        """Loads of a replica run one after the other."""
        read, copied = self._memories.load(at, adapter)
        seconds = read / READ_BYTES_PER_S + copied / COPY_BYTES_PER_S
        at.load_ends = max(at.load_ends, now) + seconds
        at.loading[adapter] = [request]
        heappush(self._events, (at.load_ends, LOADED, at.number, adapter))
        if measured:
            self.outcome.read_bytes += read
            self.outcome.copied_bytes += copied
            self.outcome.host_hits += not read

    def _enter(self, now: float, at: Replica, request: int) -> None:
        if at.running < self._shape.rows:
            self._start(now, at, request)
        else:
            at.queue.append(request)

    def _start(self, now: float, at: Replica, request: int) -> None:
        at.running += 1
        prefix = self._prefixes[request]
        cached = prefix in at.prefixes
        at.prefixes[prefix] = None
        at.prefixes.move_to_end(prefix)
        if len(at.prefixes) > PREFIXES_IN_CACHE:
            at.prefixes.popitem(last=False)
        seconds = self._prompt_s[request] - (self._prefix_s[request] if cached else 0.0)
        seconds += self._outputs[request] * (TOKEN_S + TOKEN_ROW_S * at.running)
        heappush(self._events, (now + seconds, END, at.number, request))
        if request >= self._measured_from:
            self.outcome.waits.append(now - self._times[request])
            self.outcome.prefix_hits += cached

    def _end(self, now: float, at: Replica, request: int) -> None:
        adapter = self._adapters[request]
        at.running -= 1
        at.open_requests -= 1
        at.users[adapter] -= 1
        if not at.users[adapter]:
            del at.users[adapter]
        self._policies[self._routers[request]].ended(at.number, adapter)
        if at.queue:
            self._start(now, at, at.queue.popleft())
