"""A thousand adapters registered, 64 of them resident: the real schedulers, pool and arena on a simulated clock.

Times are the expected ones of an H200 and an 8B model in bfloat16 with rank-16 adapters (84 MB each).
"""

import random
import threading
import time
from bisect import bisect
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import pytest
import torch
from tests.engine.lora.immediate_stream import ImmediateStream
from torch import Tensor

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.batch.step_plan import SampledToken, StepPlan
from loraplex.engine.config import SchedulerConfig
from loraplex.engine.kv_cache.block_pool import BlockPool
from loraplex.engine.kv_cache.prefix_cache import PrefixCache
from loraplex.engine.lora.load_budget import LoadBudget
from loraplex.engine.lora.loader import Arrival
from loraplex.engine.lora.memory.device_memory import DeviceAdapterMemory
from loraplex.engine.lora.memory.host_cache import HostCache
from loraplex.engine.lora.memory.page_copy import Mark, Span, copy_pages
from loraplex.engine.lora.memory.page_format import PageFormat
from loraplex.engine.lora.pool import AdapterPool
from loraplex.engine.lora.quarantine import QuarantineTracker
from loraplex.engine.lora.residency import AdapterState
from loraplex.engine.lora.site import make_site
from loraplex.engine.lora.weights import LoraModule, LoraWeights
from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.fairness import FairShare
from loraplex.engine.scheduling.scheduler import Scheduler
from loraplex.platform.bench.workload import arrival_offsets

LOADING = AdapterState.LOADING
CPU = torch.device("cpu")
REGISTERED, ROWS = 1000, 64
READ_S, COPY_S = 0.060, 0.002
STEP_S, STEP_S_PER_ADAPTER, STEP_S_PER_PROMPT_TOKEN = 0.006, 4e-5, 3e-5
MAX_WAIT_S = 2.0


@dataclass(slots=True)
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class TimedMark:
    clock: Clock
    due: float

    def is_reached(self) -> bool:
        return self.clock() >= self.due

    def wait(self) -> None:
        """The thread that issues copies is not simulated."""


class TimedStream:
    """One adapter after another over one link, `COPY_S` each. Its pages have one layer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_at = 0.0

    def computed(self) -> Mark | None:
        return None

    def start_after(self, mark: Mark | None) -> None:
        """Nothing computes."""

    def copy(self, target: Tensor, source: Tensor, spans: Iterable[Span]) -> None:
        ImmediateStream().copy(target, source, spans)

    def mark(self) -> Mark:
        self._free_at = max(self._free_at, self._clock()) + COPY_S
        return TimedMark(self._clock, self._free_at)


class TimedLoader:
    """One adapter after another from disk, `READ_S` each."""

    def __init__(self, clock: Clock, memory: DeviceAdapterMemory) -> None:
        self.on_loaded = threading.Event()
        self._clock = clock
        self._memory = memory
        self._free_at = 0.0
        self._queue: deque[tuple[float, AdapterRef]] = deque()

    def start(self, adapter: AdapterRef) -> None:
        self._free_at = max(self._free_at, self._clock()) + READ_S
        self._queue.append((self._free_at, adapter))

    def take(self) -> list[Arrival]:
        arrivals: list[Arrival] = []
        while self._queue and self._queue[0][0] <= self._clock():
            _, adapter = self._queue.popleft()
            module = LoraModule(torch.ones(16, 16), torch.ones(16, 16))
            packed = self._memory.pack(LoraWeights(adapter.digest, {"o": module}))
            arrivals.append(Arrival(adapter, packed, READ_S))
        return arrivals

    def release(self, nbytes: int) -> None:
        """It never waits for room."""

    def close(self) -> None:
        """No thread."""


class Server:
    """`clients` always have one request each under way, of adapters that `pick` draws; `resident` fit on the device."""

    def __init__(
        self,
        pick: Callable[[random.Random], int],
        *,
        resident: int,
        clients: int = 96,
        tenants: int = 50,
    ) -> None:
        self.clock = Clock()
        self.pool = _pool(self.clock, resident)
        config = SchedulerConfig(
            max_num_seqs=ROWS,
            max_adapters_per_step=min(ROWS, resident),
            max_adapter_wait_s=MAX_WAIT_S,
            max_waiting=4096,
        )
        cache = PrefixCache(BlockPool(ROWS * 16), 16, model_digest="m", cache_dtype="bfloat16", enabled=False)
        self.scheduler = Scheduler(
            config, cache, self.pool, FairShare(), self.clock, 256, {1}, max_tokens=2048
        )
        self.random = random.Random(5)
        self.pick = pick
        self.clients, self.tenants = clients, tenants
        self.submitted = self.tokens = 0
        self.began = 0.0
        self.live: set[Sequence] = set()
        self.waits: list[float] = []
        self.wait_of: dict[str, float] = {}
        self.host_s: list[float] = []
        self.distinct: Counter[int] = Counter()

    def ref(self, number: int) -> AdapterRef:
        namespace = (number % self.tenants).to_bytes(32, "big")
        return AdapterRef(namespace=namespace, digest=str(number), blob_path="")

    def load(self, adapters: Iterable[int]) -> None:
        """Each once, one after another; then the clock counts."""
        for number in adapters:
            while not self.pool.prefetch(self.ref(number)) or self.pool.state(self.ref(number)) is LOADING:
                self.clock.now += 0.01
                self.pool.poll()
        self.began = self.clock.now

    def submit(self, number: int) -> None:
        adapter = self.ref(number)
        request = EngineRequest(
            request_id=str(self.submitted),
            namespace=adapter.namespace,
            prompt_token_ids=[2] * 48,
            sampling=SamplingParams(max_tokens=self.random.randint(32, 64)),
            adapter=adapter,
        )
        self.submitted += 1
        self.live.update(self.scheduler.add(request))

    def run(self, requests: int) -> None:
        """Until so many have ended."""
        while len(self.waits) < requests:
            while len(self.live) < self.clients:
                self.submit(self.pick(self.random))
            began = time.thread_time()
            self.pool.poll()
            plan = self.scheduler.schedule()
            self.host_s.append(time.thread_time() - began)
            assert not self.scheduler.take_failures()
            if plan is None:
                self.clock.now += 0.001
                continue
            self.execute(plan)

    def execute(self, plan: StepPlan) -> None:
        adapters = len({row.adapter.key for row in plan.rows if row.adapter})
        self.distinct[adapters] += 1
        prompt = plan.num_tokens - len(plan.rows)
        self.clock.now += STEP_S + STEP_S_PER_ADAPTER * adapters + STEP_S_PER_PROMPT_TOKEN * prompt
        sampled = {row.sequence: SampledToken(7) for row in plan.rows if row.samples}
        self.tokens += len(sampled)
        for output in self.scheduler.complete(plan, sampled):
            if output.finish_reason is not None:
                self.live.discard(output.sequence)
                self.waits.append(output.sequence.queue_s)
                self.wait_of[output.sequence.request.request_id] = output.sequence.queue_s

    @property
    def rate(self) -> float:
        return self.tokens / (self.clock.now - self.began)

    def summary(self, name: str) -> str:
        waits = sorted(self.waits)
        host = sorted(self.host_s)
        distinct = sum(count * steps for count, steps in self.distinct.items()) / sum(self.distinct.values())
        return (
            f"{name}: {self.rate:,.0f} tokens/s, wait p50 {waits[len(waits) // 2] * 1e3:.0f} ms,"
            f" p99 {waits[len(waits) * 99 // 100] * 1e3:.0f} ms, max {waits[-1] * 1e3:.0f} ms;"
            f" {self.pool.num_loads} loads, {self.pool.host.num_hits} from host memory,"
            f" {distinct:.0f} adapters a step; host p50 {host[len(host) // 2] * 1e6:.0f} us,"
            f" p99 {host[len(host) * 99 // 100] * 1e6:.0f} us a step"
        )


def _pool(clock: Clock, resident: int) -> AdapterPool:
    """Pages of one small site, and a host tier for all: only times and counts are those of a large model."""
    nbytes = 2 * 16 * 16 * 4
    site = make_site(("o",), 16, (16,), resident, CPU, 16)
    stream = TimedStream(clock)
    memory = DeviceAdapterMemory(
        [site],
        PageFormat(torch.float32),
        max_bytes=resident * nbytes,
        max_slots=resident,
        max_rank=16,
        device=CPU,
        allocate_blob=HostCache(0).blob,
        stream=stream,
        start_copy=partial(copy_pages, stream),
    )
    loader, host = TimedLoader(clock, memory), HostCache(REGISTERED * nbytes)
    return AdapterPool(memory, loader, host, QuarantineTracker(3), LoadBudget(resident * nbytes // 4), clock)


def zipf(choose: random.Random) -> int:
    """By exponent 1.1 over all registered adapters."""
    return bisect(_ZIPF, choose.random() * _ZIPF[-1])


_ZIPF = tuple(accumulate(rank**-1.1 for rank in range(1, REGISTERED + 1)))


def served(name: str, resident: int) -> Server:
    """The same traffic for every server, after each adapter was loaded once, the most frequent last."""
    server = Server(zipf, resident=resident)
    server.load(reversed(range(REGISTERED)))
    server.run(900)
    print(server.summary(name))
    return server


def test_64_resident_of_1000_serve_nearly_what_all_resident_do() -> None:
    every, few = served("all resident", REGISTERED), served("64 resident", 64)
    print(f"share {few.rate / every.rate:.3f}")
    assert few.rate >= 0.9 * every.rate
    assert max(few.waits) <= 1.25 * max(every.waits) < MAX_WAIT_S


def test_a_rare_adapter_gets_in_although_hot_ones_never_pause() -> None:
    """Eight places, eight hot adapters with rows at all times: none is ever idle, so one must be drained for the ninth."""
    server = Server(lambda choose: choose.randrange(8), resident=8)
    server.load(range(9))
    server.run(60)
    rare: list[str] = []
    for number in (8, 9, 10):
        rare.append(str(server.submitted))
        server.submit(number)
        server.run(len(server.waits) + 500)
    drain_s = 64 * 2 * STEP_S
    waits = [server.wait_of[request] for request in rare]
    print("rare adapters waited", [f"{wait:.2f} s" for wait in waits])
    assert all(MAX_WAIT_S <= wait <= MAX_WAIT_S + drain_s + READ_S for wait in waits)


def test_a_step_costs_no_more_for_more_resident_adapters() -> None:
    """What the step loop asks of the pool, with one adapter in use: seconds of CPU, the best of many."""
    times: list[float] = []
    for resident in (16, 1500):
        server = Server(zipf, resident=resident)
        server.load(range(resident))
        used, other = server.ref(resident - 1), server.ref(resident - 2)
        server.pool.pin(used)
        samples: list[float] = []
        for _ in range(200):
            began = time.thread_time()
            server.pool.poll()
            assert server.pool.slots()[used.key] >= 0 and server.pool.resident_bytes > 0
            server.pool.pin(other)
            server.pool.unpin(other)
            samples.append(time.thread_time() - began)
        times.append(min(samples))
    assert times[1] < 5 * times[0] + 1e-5


@pytest.mark.parametrize("adapters", [6, 100], ids=["all resident", "most absent"])
def test_a_light_tenants_adapter_is_loaded_before_a_heavy_ones_backlog(adapters: int) -> None:
    """One tenant has three hundred requests under way, over few adapters or many; the other one at a time, of a new adapter."""
    server = Server(lambda choose: 2 * choose.randrange(adapters), resident=16, clients=300, tenants=2)
    server.load(range(0, 2 * adapters, 2))
    server.run(100)
    light: list[str] = []
    for number in (501, 503, 505, 507):
        light.append(str(server.submitted))
        server.submit(number)
        server.run(len(server.waits) + 250)
    waits = [server.wait_of[request] for request in light]
    heavy = sorted(server.waits)[-50]
    print(f"light tenant waited {[f'{wait:.2f} s' for wait in waits]}, the heavy one up to {heavy:.2f} s")
    assert max(waits) < 0.5 * MAX_WAIT_S < heavy, "a place is free when one of sixteen has ended its rows"


def test_a_tenants_few_adapters_keep_their_places_beside_many_of_another() -> None:
    """Sixteen places. One tenant has 300 requests under way over 64 adapters, the other 20 a second over four.

    Before adapters that arrived were pinned and rows gave way for them, the wait was 2.0 s at p99.
    """
    server = Server(lambda choose: 2 * choose.randrange(64), resident=16, clients=300, tenants=2)
    server.load([*range(1, 9, 2), *range(0, 128, 2)])
    arrivals = deque(server.began + at for at in arrival_offsets(300, 20.0, 1))
    light: list[str] = []
    while arrivals:
        while arrivals and arrivals[0] <= server.clock.now:
            arrivals.popleft()
            light.append(str(server.submitted))
            server.clients += 1
            server.submit(2 * server.random.randrange(4) + 1)
        server.run(len(server.waits) + 1)
        server.clients = 300
    server.run(len(server.waits) + 300)
    waits = sorted(server.wait_of[request] for request in light)
    print(f"light tenant waited p99 {waits[-3]:.3f} s, {server.rate:,.0f} tokens/s")
    assert waits[-3] < 0.2
