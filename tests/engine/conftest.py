"""A simulated engine around the real scheduler: a clock, a residency with loading times, and a runner whose "KV" is checked."""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from tests.engine.interpreter_runs import INTERPRETING, InterpreterRuns

from loraplex.engine.batch.sequence import Sequence, SequenceStatus
from loraplex.engine.batch.step_plan import UNKNOWN_TOKEN, PlannedRow, SampledToken, StepOutput, StepPlan
from loraplex.engine.config import SchedulerConfig
from loraplex.engine.errors import AdapterError, AdapterLoadFailed, EngineError
from loraplex.engine.kv_cache.block_pool import BlockPool
from loraplex.engine.kv_cache.prefix_cache import PrefixCache
from loraplex.engine.lora.residency import AdapterState
from loraplex.engine.messages import AdapterRef, AdapterTier, EngineRequest
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling import grammar_advance
from loraplex.engine.scheduling.fairness import FairShare
from loraplex.engine.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from torch import Tensor

if INTERPRETING:
    from tests.engine import fast_interpreter

    fast_interpreter.install()

BLOCK_SIZE = 4
END_TOKEN = 1


class ScriptedMask:
    """A grammar of finitely many documents of token ids, which may be slow or broken where a test says so.

    Invariant: it notices when two threads use it at once.
    """

    def __init__(
        self,
        documents: Iterable[tuple[int, ...]],
        *,
        fast_forward: bool = False,
        closes: bool = False,
        slow_at: dict[int, float] | None = None,
        gates: dict[int, threading.Event] | None = None,
        broken: str = "",
        spent: str = "",
        taken: tuple[int, ...] = (),
        family: object = None,
    ) -> None:
        """`slow_at`: seconds a mask takes, by position. `gates`: what a mask waits for, by position.

        `broken` and `spent` name a method that raises.
        """
        self.family = family or self
        self.documents = tuple(documents)
        self.taken = list(taken)
        self.closes = closes
        self.forks: list[ScriptedMask] = []
        self._options: dict[str, Any] = {
            "fast_forward": fast_forward,
            "closes": closes,
            "slow_at": slow_at or {},
            "gates": gates or {},
            "broken": broken,
            "spent": spent,
        }
        self._lock = threading.Lock()

    @contextmanager
    def _used(self, method: str) -> Iterator[None]:
        assert self._lock.acquire(blocking=False), "two threads use one mask"
        try:
            if self._options["broken"] == method:
                raise RuntimeError(f"{method} is broken")
            if self._options["spent"] == method:
                raise TimeoutError(f"{method} may take no more work")
            yield
        finally:
            self._lock.release()

    def _rests(self) -> list[tuple[int, ...]]:
        count = len(self.taken)
        return [d[count:] for d in self.documents if d[:count] == tuple(self.taken)]

    def allowed(self) -> list[int]:
        """The tokens that may follow, the end token included."""
        return sorted({rest[0] if rest else END_TOKEN for rest in self._rests()})

    def fill(self, bitmask: "Tensor", row: int) -> None:
        with self._used("fill"):
            gate = self._options["gates"].get(len(self.taken))
            assert gate is None or gate.wait(60)
            time.sleep(self._options["slow_at"].get(len(self.taken), 0.0))
            bitmask[row] = 0
            for token in self.allowed():
                bit = 1 << token % 32
                bitmask[row, token // 32] |= bit - (1 << 32) if token % 32 == 31 else bit

    def accept(self, token_id: int) -> bool:
        with self._used("accept"):
            accepted = token_id != END_TOKEN and token_id in self.allowed()
            if accepted:
                self.taken.append(token_id)
            return accepted

    def rollback(self, count: int) -> None:
        with self._used("rollback"):
            del self.taken[len(self.taken) - count :]

    def fork(self) -> "ScriptedMask":
        with self._used("fork"):
            copy = ScriptedMask(self.documents, taken=tuple(self.taken), **self._options)
            self.forks.append(copy)
            return copy

    def is_complete(self) -> bool:
        return () in self._rests()

    def is_final(self) -> bool:
        return self._rests() == [()]

    def forced_tokens(self) -> list[int]:
        forced: list[int] = []
        with self._used("forced_tokens"):
            rests = self._rests() if self._options["fast_forward"] else []
            while rests and () not in rests and len({rest[0] for rest in rests}) == 1:
                forced.append(rests[0][0])
                rests = [rest[1:] for rest in rests]
        return forced

    def closing_tokens(self, most: int) -> list[int] | None:
        with self._used("closing_tokens"):
            shortest = min(self._rests(), key=len)
            return list(shortest) if self.closes and len(shortest) <= most else None


@pytest.fixture(scope="session")
def interpreter_runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InterpreterRuns]:
    """The files that this session's tests want interpreted; without others beside it, on their way from now on."""
    marks = [mark for item in request.session.items for mark in item.iter_markers("interpreted")]
    is_long = bool(request.config.getoption("--long"))
    runs = InterpreterRuns(marks, tmp_path_factory.mktemp("interpreted"), is_long=is_long)
    yield runs
    runs.close()


@pytest.fixture(scope="module", autouse=True)
def no_time_limit() -> Iterator[None]:
    """A garbage collection in the middle of a grammar's work is none of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_advance, "MAX_SECONDS", (60.0, 60.0))
        patch.setattr(grammar_advance, "MAX_SECONDS_CLOSING", 60.0)
        yield


@pytest.fixture(scope="session")
def scripted_mask() -> type[ScriptedMask]:
    """The class itself: every test writes its own documents."""
    return ScriptedMask


@dataclass
class SimulatedResidency:
    """Holds `budget` adapters of size 1; a load takes `load_s`; digests in `broken` fail.

    As in `AdapterPool`, loads that are done are placed once a step, and on `place`; up to 4 are in progress or wait for room,
    of one tenant 2, and a fifth one where its tenant has none. Of a loader that `stops` nothing is read while what was read
    finds no room.
    """

    clock: Callable[[], float]
    budget: int = 2
    load_s: float = 0.0
    broken: set[str] = field(default_factory=set)
    stops: bool = False
    without_room: dict[tuple[bytes, str], float] = field(default_factory=dict)
    due: OrderedDict[tuple[bytes, str], float] = field(default_factory=OrderedDict)
    pins: Counter[tuple[bytes, str]] = field(default_factory=Counter)
    errors: dict[tuple[bytes, str], AdapterError] = field(default_factory=dict)
    num_loads: int = 0
    placed_at: float = -1.0

    def state(self, adapter: AdapterRef) -> AdapterState:
        if adapter.key in self.errors:
            return AdapterState.FAILED
        if self.placed_at < self.clock():
            self._place_all()
        if adapter.key in self.without_room:
            return AdapterState.LOADING
        if adapter.key not in self.due:
            return AdapterState.ABSENT
        if self.clock() < self.due[adapter.key]:
            return AdapterState.LOADING
        if adapter.digest in self.broken:
            del self.due[adapter.key]
            self.errors[adapter.key] = AdapterLoadFailed(f"{adapter.digest} is broken")
            return AdapterState.FAILED
        return AdapterState.RESIDENT

    def prefetch(self, adapter: AdapterRef) -> bool:
        own = sum(key[0] == adapter.namespace for key in self.without_room)
        if own >= 2 or len(self.without_room) > (3 if own else 4):
            return False
        self.without_room[adapter.key] = self.clock() + self.load_s
        self.num_loads += 1
        return True

    def tier(self, adapter: AdapterRef) -> AdapterTier:
        return "device" if self.clock() >= self.due.get(adapter.key, float("inf")) else "disk"

    def size_bytes(self, adapter: AdapterRef) -> int:
        return 1 << 20 if adapter.key in self.due else 0

    def lacks_room(self, adapter: AdapterRef) -> bool:
        full = len(self.due) >= self.budget and self._victim() is None
        return full and self.clock() >= self.without_room.get(adapter.key, float("inf"))

    def place(self, adapter: AdapterRef) -> None:
        if self.lacks_room(adapter) or adapter.key not in self.without_room:
            return
        self.without_room = {adapter.key: self.without_room[adapter.key], **self.without_room}
        self._place_all()

    def load_seconds(self, adapter: AdapterRef) -> float:
        return self.load_s

    def pin(self, adapter: AdapterRef) -> None:
        assert self.state(adapter) is AdapterState.RESIDENT
        self.pins[adapter.key] += 1
        self.due.move_to_end(adapter.key)

    def unpin(self, adapter: AdapterRef) -> None:
        self.pins[adapter.key] -= 1
        assert self.pins[adapter.key] >= 0

    def abandon(self, adapter: AdapterRef) -> None:
        self.without_room.pop(adapter.key, None)
        self.errors.pop(adapter.key, None)

    def take_error(self, adapter: AdapterRef) -> AdapterError:
        return self.errors.pop(adapter.key)

    def _victim(self) -> tuple[bytes, str] | None:
        idle = (k for k, due in self.due.items() if not self.pins[k] and due <= self.clock())
        return next(idle, None)

    def _place_all(self) -> None:
        self.placed_at = self.clock()
        placed: dict[tuple[bytes, str], float] = {}
        for key in [key for key, due in self.without_room.items() if due <= self.clock()]:
            if len(self.due) + len(placed) >= self.budget:
                victim = self._victim()
                if victim is None:
                    break
                del self.due[victim]
            placed[key] = self.without_room.pop(key)
        self.due.update(placed)
        if self.stops and any(due <= self.clock() for due in self.without_room.values()):
            for key, due in self.without_room.items():
                self.without_room[key] = due if due <= self.clock() else self.clock() + self.load_s


def next_token(tokens: list[int]) -> int:
    """The simulated model: changing any earlier token changes what follows."""
    return 10 + hash(tuple(tokens)) % 1000


def _sampled(sequence: Sequence) -> int:
    token = next_token(sequence.token_ids)
    if not isinstance(sequence.token_mask, ScriptedMask):
        return token
    allowed = sequence.token_mask.allowed()
    return allowed[token % len(allowed)]


class Simulation:
    """Runs steps of `step_s` seconds and asserts after each of them whatever must always hold."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        policy: FairShare | None = None,
        prefix_caching: bool = True,
        residency: dict[str, Any] | None = None,
        max_model_len: int = 256,
        overlap: bool = False,
        **config: Any,
    ) -> None:
        """With `overlap` a step is launched before the results of the previous one are processed, as in `Engine`."""
        self.overlap = overlap
        self.in_flight: StepPlan | None = None
        self._results: dict[Sequence, SampledToken] = {}
        self.now = 0.0
        self.step_s = 0.1
        self.residency = SimulatedResidency(lambda: self.now, **(residency or {}))
        self.pool = BlockPool(num_blocks)
        cache = PrefixCache(
            self.pool, BLOCK_SIZE, model_digest="m", cache_dtype="float32", enabled=prefix_caching
        )
        limits = SchedulerConfig(**config)
        self.scheduler = Scheduler(
            limits,
            cache,
            self.residency,
            FairShare() if policy is None else policy,
            lambda: self.now,
            max_model_len,
            {1},
            max_tokens=limits.max_tokens(is_cuda=False),
        )
        self.sequences: list[Sequence] = []
        self.masks: dict[Sequence, ScriptedMask] = {}
        self.outputs: list[StepOutput] = []
        self.failures: list[tuple[Sequence, EngineError]] = []
        self.first_token_at: dict[Sequence, float] = {}
        self.nan: set[Sequence] = set()
        self.late: set[Sequence] = set()
        self.computed_tokens = 0
        self._slots: dict[tuple[int, int], tuple[object, ...]] = {}

    def submit(
        self,
        prompt: list[int],
        *,
        tenant: str = "t",
        adapter: str | None = None,
        max_tokens: int = 4,
        sampling: dict[str, Any] | None = None,
        **fields: Any,
    ) -> list[Sequence]:
        namespace = tenant.encode()
        request = EngineRequest(
            request_id=fields.pop("request_id", f"r{len(self.sequences)}"),
            namespace=namespace,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, **(sampling or {})),
            adapter=AdapterRef(namespace=namespace, digest=adapter, blob_path="") if adapter else None,
            **fields,
        )
        added = self.scheduler.add(request)
        self.sequences += added
        return added

    def give_mask(self, choices: list[Sequence], mask: ScriptedMask) -> None:
        """Let a request submitted with a `grammar` go on, as the engine does once it is compiled."""
        masks = [mask, *(mask.fork() for _ in choices[1:])]
        for sequence, each in zip(choices, masks, strict=True):
            if sequence.status is not SequenceStatus.FINISHED:
                self.masks[sequence] = sequence.token_mask = each

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self._check_plan(plan)
        self.now += self.step_s
        if self.overlap:
            self._step_ahead(plan)
        elif plan is not None:
            self._record(self.scheduler.complete(plan, self.execute(plan)))
        self.failures += self.scheduler.take_failures()
        self.check()
        return plan

    @property
    def is_busy(self) -> bool:
        return self.scheduler.has_unfinished or self.in_flight is not None

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.is_busy:
                return
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps")

    def execute(self, plan: StepPlan) -> dict[Sequence, SampledToken]:
        self._compute(plan, {})
        return {s: self._token(s) for s in (r.sequence for r in plan.rows if r.samples) if s not in self.late}

    def _step_ahead(self, plan: StepPlan | None) -> None:
        before, results = self.in_flight, self._results
        self.in_flight = plan
        if plan is not None:
            self._compute(plan, results)
        if before is not None:
            self._record(self.scheduler.complete(before, results))
        if plan is not None:
            sequences = [row.sequence for row in self.scheduler.sampling_rows(plan)]
            self._results = {s: self._token(s) for s in sequences if s not in self.late}
            self.scheduler.expect(plan, self._results, [s for s in sequences if s in self.late])

    def _record(self, outputs: list[StepOutput]) -> None:
        self.outputs += outputs
        self.first_token_at.update({o.sequence: self.now for o in outputs if o.first})

    def _token(self, sequence: Sequence) -> SampledToken:
        return SampledToken(_sampled(sequence), finite=sequence not in self.nan)

    def _compute(self, plan: StepPlan, before: dict[Sequence, SampledToken]) -> None:
        for row in plan.rows:
            tokens = list(row.sequence.token_ids)
            if row.token_ids[-1] == UNKNOWN_TOKEN:
                tokens.append(before[row.sequence].token_id)
            self._execute_row(row, tokens)

    def check(self) -> None:
        pool = self.pool
        assert pool.num_free + pool.num_cached + pool.num_referenced == pool.total
        held = Counter(block for s in self.sequences for block in s.block_table)
        assert all(pool.references(block) == held[block] for block in range(pool.total))
        computing = () if self.in_flight is None else self.in_flight.rows
        assert all(self.residency.pins[row.adapter.key] > 0 for row in computing if row.adapter)

    def check_idle(self) -> None:
        """Everything was given back."""
        self.check()
        assert self.pool.num_referenced == 0
        assert not any(self.residency.pins.values())
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert self.scheduler.num_waiting_for_adapter == 0

    def _check_plan(self, plan: StepPlan | None) -> None:
        config = self.scheduler.config
        rows = () if plan is None else plan.rows
        assert len(rows) <= config.max_num_seqs and len({row.sequence for row in rows}) == len(rows)
        assert [row.decodes for row in rows] == sorted((row.decodes for row in rows), reverse=True)
        assert len({row.adapter.key for row in rows if row.adapter}) <= config.max_adapters_per_step
        assert all(self.residency.pins[row.adapter.key] > 0 for row in rows if row.adapter)
        if plan is not None:
            assert plan.num_tokens <= self.scheduler.max_tokens
            running = [s for s in self.sequences if s.status is SequenceStatus.RUNNING]
            oldest = min(running, key=lambda s: s.order)
            waits = oldest.awaits_mask or oldest.num_unknown
            progresses = waits or any(row.sequence is oldest for row in rows)
            assert progresses, "the oldest does not progress"
        if plan is None:
            running = [s for s in self.sequences if s.status is SequenceStatus.RUNNING]
            assert all(s.awaits_mask or s.num_launched for s in running)

    def _execute_row(self, row: PlannedRow, tokens: list[int]) -> None:
        assert row.samples == (row.start + len(row.token_ids) == len(tokens))
        for position in range(row.start + len(row.token_ids)):
            request = row.sequence.request
            digest = row.adapter.digest if row.adapter else None
            content = (request.namespace, digest, request.cache_salt, tuple(tokens[: position + 1]))
            slot = (row.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE)
            if position >= row.start:
                assert row.token_ids[position - row.start] in (tokens[position], UNKNOWN_TOKEN)
                self._slots[slot] = content
                self.computed_tokens += 1
            assert self._slots[slot] == content, "a row reads KV that is not its own"


@pytest.fixture(scope="session")
def simulation() -> type[Simulation]:
    """The class itself: every test builds its own."""
    return Simulation
