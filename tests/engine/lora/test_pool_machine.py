"""Any order of prefetch, arrival, pin, unpin and reports, on blobs in host memory and on an arena of pages."""

from itertools import pairwise

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.engine.lora.driven_pool import (
    ABSENT,
    FAILED,
    LOADING,
    NAME,
    RANK_BYTES,
    RESIDENT,
    DrivenPool,
    Source,
    contiguous,
    paged,
    ref,
    weights,
)

from loraplex.engine.errors import AdapterError, AdapterTooLarge


class PoolMachine(RuleBasedStateMachine):
    """The loader is a thread and brings what it brings when it does, so nothing that is drawn may depend on it."""

    digests = st.sampled_from([f"{rank}-{i}" for rank in (1, 2, 5, 9) for i in range(3)])

    @initialize(
        budget=st.integers(1, 12),
        slots=st.integers(1, 4),
        broken=st.sets(digests, max_size=2),
        in_pages=st.booleans(),
        host=st.sampled_from([0, 20, 100]),
    )
    def start(self, budget: int, slots: int, broken: set[str], in_pages: bool, host: int) -> None:
        source = Source()
        source.errors = {digest: RuntimeError("broken") for digest in broken}
        memory = paged if in_pages else contiguous
        # In an arena: one slab and more, each of which holds two pages of 16 ranks or more of fewer.
        self.budget = budget * 20 if in_pages else budget
        self.pool = DrivenPool(source, self.budget, max_slots=slots, host_ranks=host, memory=memory)
        self.in_pages = in_pages
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

    @rule(place=st.integers(0, 11))
    def unpin(self, place: int) -> None:
        if not self.pins:
            return
        digest = sorted(self.pins)[place % len(self.pins)]
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
        if self.pool.state(ref(digest)) is FAILED:
            error = self.pool.take_error(ref(digest))
            assert isinstance(error, AdapterError)
            if not self.in_pages:
                too_large = int(digest.split("-")[0]) > self.budget and digest not in self.pool.source.errors
                assert isinstance(error, AdapterTooLarge) == too_large
            assert self.pool.state(ref(digest)) is ABSENT

    @rule()
    def everything_fits_that_waits_once_nothing_is_pinned(self) -> None:
        """What was let through as not too large never waits for ever."""
        for digest, pins in self.pins.items():
            for _ in range(pins):
                self.pool.unpin(ref(digest))
        self.pins.clear()
        while self.pool._loading:
            self.pool.wait()
        for _ in range(2 * len(self.pool._without_room)):
            self.pool.poll()
        assert not self.pool._without_room and not self.pool._moving

    @invariant()
    def holds(self) -> None:
        pool = self.pool
        slots = pool.slots()
        ranks = {digest: int(digest.split("-")[0]) for _, digest in slots}
        assert pool.resident_bytes <= pool.max_bytes <= self.budget * RANK_BYTES
        assert pool.host.nbytes <= pool.host.max_bytes
        assert self.pins.keys() <= ranks.keys() <= self.asked
        assert self.pins == {digest: pool.pins(digest) for digest in self.pins}
        assert pool.num_pinned == len(self.pins)
        assert len(set(slots.values())) == len(slots) and set(pool.site.slots) == set(slots.values())
        for (_, digest), slot in slots.items():
            assert pool.site.table[slot, 0, 0] == ranks[digest]
            module = weights(digest, ranks[digest]).modules[NAME]
            a, b = pool.tensors(digest)
            assert torch.equal(a, module.a) and torch.equal(b, module.b.t())
        assert int(pool.site.table[:, 0, 0].count_nonzero()) == len(slots)
        self.check_bytes(ranks)

    def check_bytes(self, ranks: dict[str, int]) -> None:
        """To the row on host memory; in an arena every page is at least the rows it holds."""
        rows = sum(ranks.values()) * RANK_BYTES
        if not self.in_pages:
            assert self.pool.resident_bytes == rows
            return
        assert rows <= self.pool.resident_bytes <= rows + len(ranks) * 2 * 15
        pages = sorted(int(page) for page in self.pool.site.table[:, 0, 2:].flatten() if page)
        assert all(later - earlier >= 20 for earlier, later in pairwise(pages))


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
