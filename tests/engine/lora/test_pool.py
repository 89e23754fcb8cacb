"""`AdapterPool`: bounded by bytes, least recently used first, pinned ones never; nothing a source does ends the loader."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from loraplex.engine.errors import (
    AdapterError,
    AdapterLoadFailed,
    AdapterQuarantined,
    AdapterTooLarge,
)
from loraplex.engine.lora import pool as pool_module
from loraplex.engine.lora.pool import MAX_LOADS_IN_FLIGHT, AdapterPool
from loraplex.engine.lora.residency import AdapterState
from loraplex.engine.lora.site import ALIGNMENT, MAX_RANK, LoraSite, make_site
from loraplex.engine.lora.weights import LoraModule, LoraWeights
from loraplex.engine.messages import AdapterRef

CPU = torch.device("cpu")
INPUTS, OUTPUTS = 8, 5
RANK_BYTES = (INPUTS + OUTPUTS) * 4
PATIENCE_S = 10.0

LOADING, RESIDENT, ABSENT = AdapterState.LOADING, AdapterState.RESIDENT, AdapterState.ABSENT


class Source:
    """Adapters of one module. `hold` a digest and its load waits for `release`; a digest in `errors` fails."""

    def __init__(self) -> None:
        self.ranks: dict[str, int] = {}
        self.errors: dict[str, Exception] = {}
        self.gates: dict[str, threading.Event] = {}
        self.threads: set[str] = set()
        self.loads: list[str] = []

    def hold(self, digest: str) -> None:
        self.gates[digest] = threading.Event()

    def release(self, digest: str) -> None:
        self.gates.pop(digest).set()

    def load(self, adapter: AdapterRef) -> LoraWeights:
        digest = adapter.digest
        self.threads.add(threading.current_thread().name)
        self.loads.append(digest)
        gate = self.gates.get(digest)
        assert gate is None or gate.wait(PATIENCE_S)
        if digest in self.errors:
            raise self.errors[digest]
        return weights(digest, self.ranks.get(digest, 1))


def weights(digest: str, rank: int, name: str = "layers.0.o_proj", inputs: int = INPUTS) -> LoraWeights:
    generator = torch.Generator().manual_seed(rank)
    a = torch.randn((rank, inputs), generator=generator)
    return LoraWeights(digest, {name: LoraModule(a, torch.randn((OUTPUTS, rank), generator=generator))})


def ref(digest: str, namespace: bytes = b"t") -> AdapterRef:
    return AdapterRef(namespace=namespace, digest=digest, blob_path="")


class Pool(AdapterPool):
    """The pool of one site, waiting for its loader where a test asks for it."""

    def __init__(
        self, source: Source, max_ranks: float, max_slots: int = 8, quarantine_after: int = 2
    ) -> None:
        self.source = source
        self.site: LoraSite = make_site(("layers.0.o_proj",), INPUTS, (OUTPUTS,), max_slots, CPU)
        super().__init__(
            [self.site],
            source,
            max_bytes=int(max_ranks * RANK_BYTES),
            max_rank=16,
            max_slots=max_slots,
            quarantine_after=quarantine_after,
            dtype=torch.float32,
            device=CPU,
        )

    def wait(self) -> None:
        """Until the loader has brought something; then install it."""
        assert self.on_loaded.wait(PATIENCE_S)
        self.poll()

    def bring(self, digest: str, rank: int = 1) -> None:
        """Load to the end, whatever it is."""
        self.source.ranks[digest] = rank
        assert self.prefetch(ref(digest))
        while self.state(ref(digest)) is LOADING:
            self.wait()

    def tensors(self, digest: str) -> tuple[Tensor, Tensor]:
        (part,) = self.site.slots[self.slot_of(ref(digest))]
        assert part is not None
        return part.a, part.b


@pytest.fixture
def make_pool() -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def make(max_ranks: float, **options: int) -> Pool:
        made.append(Pool(Source(), max_ranks, **options))
        return made[-1]

    yield make
    for pool in made:
        for digest in list(pool.source.gates):
            pool.source.release(digest)
        pool.close()


def test_a_load_runs_on_its_own_thread_and_is_installed_by_poll(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(4)
    pool.source.hold("a")
    assert pool.state(ref("a")) is ABSENT
    assert pool.prefetch(ref("a")) and pool.prefetch(ref("a"))
    pool.poll()
    assert pool.state(ref("a")) is LOADING
    pool.source.release("a")
    assert pool.on_loaded.wait(PATIENCE_S)
    assert pool.state(ref("a")) is LOADING, "only poll installs"
    pool.poll()
    assert pool.state(ref("a")) is RESIDENT
    assert pool.source.loads == ["a"] and pool.source.threads == {"adapter-loader"}


def test_what_is_installed_is_the_adapter(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(10)
    pool.bring("a", rank=3)
    a, b = pool.tensors("a")
    module = weights("a", 3).modules["layers.0.o_proj"]
    assert torch.equal(a, module.a) and torch.equal(b, module.b.t())
    assert a.data_ptr() % ALIGNMENT == b.data_ptr() % ALIGNMENT == 0
    entry = pool.site.table[pool.slot_of(ref("a")), 0]
    assert entry[entry != 0].tolist() == [3, a.data_ptr(), b.data_ptr()]


def test_bytes_are_those_of_the_tensors(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(30)
    for rank in (1, 3, 16):
        pool.bring(f"rank {rank}", rank)
    held = sum(t.nbytes for rank in (1, 3, 16) for t in pool.tensors(f"rank {rank}"))
    assert pool.resident_bytes == held == 20 * RANK_BYTES
    assert pool.max_bytes == 30 * RANK_BYTES


def test_the_least_recently_used_goes_first(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(3)
    for digest in "abc":
        pool.bring(digest)
    pool.pin(ref("a"))
    pool.unpin(ref("a"))
    pool.bring("d")
    assert pool.resident_digests == ["c", "a", "d"]
    pool.bring("e", rank=2)
    assert pool.resident_digests == ["d", "e"]
    assert (pool.num_evictions, pool.num_loads) == (3, 5)
    assert set(pool.site.slots) == {pool.slot_of(ref("d")), pool.slot_of(ref("e"))}


def test_a_pinned_adapter_stays_and_others_wait_for_room(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(2)
    pool.bring("a")
    pool.bring("b")
    for digest in "aab":
        pool.pin(ref(digest))
    before = pool.tensors("a")[0].clone()
    assert pool.prefetch(ref("c"))
    pool.wait()
    assert pool.state(ref("c")) is LOADING and pool.resident_digests == ["a", "b"]
    assert (pool.num_pinned, pool.total_pins) == (2, 3)
    pool.unpin(ref("a"))
    pool.poll()
    assert pool.state(ref("c")) is LOADING, "one pin is left"
    pool.unpin(ref("a"))
    assert torch.equal(pool.tensors("a")[0], before)
    pool.poll()
    assert pool.state(ref("c")) is RESIDENT and pool.state(ref("a")) is ABSENT
    assert pool.source.loads.count("c") == 1, "what was loaded is not loaded again"


def test_nothing_is_evicted_for_what_would_not_fit_yet(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(4)
    pool.bring("a", rank=2)
    pool.bring("b")
    pool.pin(ref("a"))
    pool.source.ranks["big"] = 3
    pool.prefetch(ref("big"))
    pool.wait()
    assert pool.resident_digests == ["b", "a"] and pool.num_evictions == 0


def test_slots_are_a_limit_of_their_own(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(100, max_slots=2)
    for digest in "abc":
        pool.bring(digest)
    assert pool.resident_digests == ["b", "c"]
    assert {pool.slot_of(ref("b")), pool.slot_of(ref("c"))} == {0, 1}


def test_an_adapter_above_the_budget_fails(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(3)
    pool.bring("small")
    pool.bring("huge", rank=4)
    assert pool.state(ref("huge")) is AdapterState.FAILED
    assert isinstance(pool.take_error(ref("huge")), AdapterTooLarge)
    assert pool.resident_digests == ["small"]


def test_a_budget_of_nothing_refuses_adapters(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(0)
    assert pool.prefetch(ref("a"))
    assert isinstance(pool.take_error(ref("a")), AdapterLoadFailed)
    assert pool.source.loads == []


@pytest.mark.parametrize(
    "error", [AdapterLoadFailed("gone"), RuntimeError("a defect"), MemoryError()], ids=repr
)
def test_a_failing_source_fails_one_adapter_and_may_be_asked_again(
    make_pool: Callable[..., Pool], error: Exception
) -> None:
    pool = make_pool(3)
    pool.source.errors["a"] = error
    pool.bring("a")
    assert pool.state(ref("a")) is AdapterState.FAILED and pool.num_load_failures == 1
    assert isinstance(pool.take_error(ref("a")), AdapterLoadFailed)
    assert pool.state(ref("a")) is ABSENT
    del pool.source.errors["a"]
    pool.bring("a")
    assert pool.state(ref("a")) is RESIDENT


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (weights("other", 1), "holds other"),
        (weights("a", 1, name="layers.9.o_proj"), "is not one of this model's"),
        (weights("a", 1, inputs=INPUTS + 1), "must map 8 to 5"),
        (weights("a", 17), "allowed is 1..16"),
        (weights("a", 0), "allowed is 1..16"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    make_pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch, wrong: LoraWeights, message: str
) -> None:
    pool = make_pool(100)
    monkeypatch.setattr(pool.source, "load", lambda adapter: wrong)
    pool.prefetch(ref("a"))
    pool.wait()
    with pytest.raises(AdapterLoadFailed, match=message):
        raise pool.take_error(ref("a"))


def test_repeated_non_finite_rows_quarantine(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(3)
    pool.bring("a")
    pool.pin(ref("a"))
    pool.report_non_finite(ref("a"))
    assert pool.state(ref("a")) is RESIDENT
    pool.report_non_finite(ref("a"))
    assert pool.state(ref("a")) is AdapterState.QUARANTINED
    for _ in range(2):
        assert isinstance(pool.take_error(ref("a")), AdapterQuarantined)
    pool.unpin(ref("a"))
    assert pool.total_pins == 0 and pool.state(ref("a", b"another tenant")) is ABSENT


def test_two_tenants_share_no_adapter_of_one_digest(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(3)
    for namespace in (b"t", b"u"):
        pool.prefetch(ref("a", namespace))
        pool.wait()
    assert pool.slot_of(ref("a", b"t")) != pool.slot_of(ref("a", b"u"))
    assert pool.slots() == {(b"t", "a"): pool.slot_of(ref("a")), (b"u", "a"): pool.slot_of(ref("a", b"u"))}


def test_loads_in_flight_are_bounded(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(1)
    pool.bring("pinned")
    pool.pin(ref("pinned"))
    digests = [f"d{i}" for i in range(MAX_LOADS_IN_FLIGHT)]
    assert all(pool.prefetch(ref(digest)) for digest in digests)
    assert not pool.prefetch(ref("one more")) and pool.state(ref("one more")) is ABSENT
    while len(pool.source.loads) <= MAX_LOADS_IN_FLIGHT:
        pool.wait()
    assert not pool.prefetch(ref("one more")), "what waits for room counts"
    pool.unpin(ref("pinned"))
    while any(pool.state(ref(digest)) is LOADING for digest in digests):
        pool.poll()
    assert pool.prefetch(ref("one more"))


def test_what_nobody_waits_for_gives_its_place_in_flight_back(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(1)
    pool.bring("pinned")
    pool.pin(ref("pinned"))
    digests = [f"d{i}" for i in range(MAX_LOADS_IN_FLIGHT)]
    assert all(pool.prefetch(ref(digest)) for digest in digests)
    while pool._loading:
        pool.wait()
    assert not pool.prefetch(ref("wanted"))
    pool.abandon(ref("d2"))
    assert pool.state(ref("d2")) is ABSENT
    assert pool.prefetch(ref("wanted"))


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_load_abandoned_underway_evicts_nobody_and_leaves_no_error(
    make_pool: Callable[..., Pool], is_broken: bool
) -> None:
    pool = make_pool(1)
    pool.bring("kept")
    if is_broken:
        pool.source.errors["gone"] = AdapterLoadFailed("broken")
    pool.source.hold("gone")
    pool.prefetch(ref("gone"))
    pool.abandon(ref("gone"))
    assert pool.state(ref("gone")) is LOADING
    pool.source.release("gone")
    pool.wait()
    assert pool.state(ref("gone")) is ABSENT and pool.resident_digests == ["kept"]
    pool.source.errors.clear()
    pool.bring("gone")
    assert pool.state(ref("gone")) is RESIDENT


def test_a_load_abandoned_underway_is_kept_where_there_is_room(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(2)
    pool.source.hold("gone")
    pool.prefetch(ref("gone"))
    pool.abandon(ref("gone"))
    pool.source.release("gone")
    pool.wait()
    assert pool.state(ref("gone")) is RESIDENT


def test_an_error_nobody_asks_for_is_forgotten(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(2)
    pool.source.errors["a"] = AdapterLoadFailed("broken")
    pool.bring("a")
    pool.abandon(ref("a"))
    assert pool.state(ref("a")) is ABSENT


def test_the_memory_of_faults_is_bounded(
    make_pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "MAX_FAULTY", 3)
    pool = make_pool(2)
    for digest in ("old", "old", "b", "c", "c", "d"):
        pool.report_non_finite(ref(digest))
    states = {digest: pool.state(ref(digest)) for digest in ("old", "b", "c", "d")}
    assert states == {"old": ABSENT, "b": ABSENT, "c": AdapterState.QUARANTINED, "d": ABSENT}


@pytest.mark.parametrize("max_rank", [0, MAX_RANK + 1])
def test_a_rank_the_kernels_have_no_room_for_is_refused_at_the_start(max_rank: int) -> None:
    with pytest.raises(ValueError, match="max_rank must lie in 1..256"):
        AdapterPool(
            [],
            Source(),
            max_bytes=1,
            max_rank=max_rank,
            max_slots=1,
            quarantine_after=1,
            dtype=torch.float32,
            device=CPU,
        )


class PoolMachine(RuleBasedStateMachine):
    """Any order of prefetch, arrival, pin, unpin and reports, with a loader that is always waited for."""

    digests = st.sampled_from([f"{rank}-{i}" for rank in (1, 2, 5, 9) for i in range(3)])

    @initialize(budget=st.integers(1, 12), slots=st.integers(1, 4), broken=st.sets(digests, max_size=2))
    def start(self, budget: int, slots: int, broken: set[str]) -> None:
        source = Source()
        source.errors = {digest: RuntimeError("broken") for digest in broken}
        self.pool = Pool(source, budget, max_slots=slots)
        self.budget = budget
        self.pins: dict[str, int] = {}
        self.asked: set[str] = set()

    def teardown(self) -> None:
        self.pool.close()

    @rule(digest=digests)
    def prefetch(self, digest: str) -> None:
        self.pool.source.ranks[digest] = int(digest.split("-")[0])
        if self.pool.prefetch(ref(digest)):
            self.asked.add(digest)

    @rule()
    def poll(self) -> None:
        self.pool.poll()

    @rule()
    def let_everything_arrive(self) -> None:
        while self.pool._loading:
            self.pool.wait()

    @rule(digest=digests)
    def pin(self, digest: str) -> None:
        if self.pool.state(ref(digest)) is RESIDENT:
            self.pool.pin(ref(digest))
            self.pins[digest] = self.pins.get(digest, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(self.pins)))
        self.pool.unpin(ref(digest))
        self.pins[digest] -= 1
        if not self.pins[digest]:
            del self.pins[digest]

    @rule(digest=digests)
    def abandon(self, digest: str) -> None:
        self.pool.abandon(ref(digest))
        assert self.pool.state(ref(digest)) in (ABSENT, LOADING, RESIDENT)

    @rule(digest=digests)
    def take_error(self, digest: str) -> None:
        if self.pool.state(ref(digest)) is AdapterState.FAILED:
            error = self.pool.take_error(ref(digest))
            assert isinstance(error, AdapterError)
            too_large = int(digest.split("-")[0]) > self.budget
            assert isinstance(error, AdapterTooLarge) == (too_large and digest not in self.pool.source.errors)
            assert self.pool.state(ref(digest)) is ABSENT

    @invariant()
    def holds(self) -> None:
        pool = self.pool
        slots = pool.slots()
        ranks = {digest: int(digest.split("-")[0]) for _, digest in slots}
        assert pool.resident_bytes == sum(ranks.values()) * RANK_BYTES <= pool.max_bytes
        assert self.pins.keys() <= ranks.keys() <= self.asked
        assert (pool.total_pins, pool.num_pinned) == (sum(self.pins.values()), len(self.pins))
        assert len(set(slots.values())) == len(slots) and set(pool.site.slots) == set(slots.values())
        for (_, digest), slot in slots.items():
            assert pool.site.table[slot, 0, 0] == ranks[digest]
            module = weights(digest, ranks[digest]).modules["layers.0.o_proj"]
            assert torch.equal(pool.tensors(digest)[0], module.a)
        assert int(pool.site.table[:, 0, 0].count_nonzero()) == len(slots)
        assert len(pool._loading) + len(pool._without_room) <= MAX_LOADS_IN_FLIGHT


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
