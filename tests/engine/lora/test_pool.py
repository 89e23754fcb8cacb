"""`AdapterPool`: bounded by bytes and slots, least recently used first, pinned ones never."""

from collections.abc import Callable

import pytest
import torch
from tests.engine.lora.driven_pool import (
    ABSENT,
    FAILED,
    LOADING,
    NAME,
    QUARANTINED,
    RANK_BYTES,
    RESIDENT,
    DrivenPool,
    paged,
    ref,
    weights,
)

from loraplex.engine.errors import AdapterLoadFailed, AdapterQuarantined, AdapterTooLarge
from loraplex.engine.lora.page_geometry import ALIGNMENT

MakePool = Callable[..., DrivenPool]


def test_what_is_installed_is_the_adapter(make_pool: MakePool) -> None:
    pool = make_pool(10)
    pool.bring("a", rank=3)
    a, b = pool.tensors("a")
    module = weights("a", 3).modules[NAME]
    assert torch.equal(a, module.a) and torch.equal(b, module.b.t())
    assert a.data_ptr() % ALIGNMENT == b.data_ptr() % ALIGNMENT == 0
    assert pool.site.table[pool.slot("a"), 0].tolist() == [3, 0, a.data_ptr(), b.data_ptr()]


def test_bytes_are_those_of_the_tensors(make_pool: MakePool) -> None:
    pool = make_pool(30)
    for rank in (1, 3, 16):
        pool.bring(f"rank {rank}", rank)
    held = sum(t.nbytes for rank in (1, 3, 16) for t in pool.tensors(f"rank {rank}"))
    assert pool.resident_bytes == held == 20 * RANK_BYTES
    assert pool.max_bytes == 30 * RANK_BYTES


def test_the_least_recently_used_goes_first(make_pool: MakePool) -> None:
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
    assert set(pool.site.slots) == {pool.slot("d"), pool.slot("e")}


def test_a_pinned_adapter_stays_and_others_wait_for_room(make_pool: MakePool) -> None:
    pool = make_pool(2)
    pool.bring("a")
    pool.bring("b")
    for digest in "aab":
        pool.pin(ref(digest))
    before = pool.tensors("a")[0].clone()
    assert pool.prefetch(ref("c"))
    pool.wait()
    assert pool.state(ref("c")) is LOADING and pool.resident_digests == ["a", "b"]
    assert (pool.num_pinned, pool.pins("a"), pool.pins("b")) == (2, 2, 1)
    pool.unpin(ref("a"))
    pool.poll()
    assert pool.state(ref("c")) is LOADING, "one pin is left"
    pool.unpin(ref("a"))
    assert torch.equal(pool.tensors("a")[0], before)
    pool.poll()
    assert pool.state(ref("c")) is RESIDENT and pool.state(ref("a")) is ABSENT
    assert pool.source.loads.count("c") == 1, "what was loaded is not loaded again"


def test_room_is_lacking_once_it_was_tried_and_goes_to_the_one_that_is_placed(make_pool: MakePool) -> None:
    pool = make_pool(2, host_ranks=16)
    for digest in "cdab":
        pool.bring(digest)
    assert pool.tier(ref("c")) == pool.tier(ref("d")) == "host"
    for digest in "ab":
        pool.pin(ref(digest))
    for digest in "cd":
        assert pool.prefetch(ref(digest))
        assert not pool.lacks_room(ref(digest)), "nothing has tried to place it yet"
    pool.poll()
    assert all(pool.lacks_room(ref(digest)) for digest in "cd")
    pool.unpin(ref("a"))
    pool.place(ref("d"))
    assert (pool.state(ref("d")), pool.state(ref("c"))) == (RESIDENT, LOADING)
    assert not pool.lacks_room(ref("d"))
    pool.place(ref("d"))
    assert pool.state(ref("d")) is RESIDENT, "what is placed makes no room for the one that waits"


def test_nothing_is_evicted_for_what_would_not_fit_yet(make_pool: MakePool) -> None:
    pool = make_pool(4)
    pool.bring("a", rank=2)
    pool.bring("b")
    pool.pin(ref("a"))
    pool.source.ranks["big"] = 3
    pool.prefetch(ref("big"))
    pool.wait()
    assert pool.resident_digests == ["b", "a"] and pool.num_evictions == 0


@pytest.mark.parametrize("options", [{}, {"memory": paged}], ids=["contiguous", "paged"])
def test_slots_are_a_limit_of_their_own(
    make_pool: MakePool, options: dict[str, Callable[..., object]]
) -> None:
    pool = make_pool(100, max_slots=2, **options)
    for digest in "abc":
        pool.bring(digest)
    assert pool.resident_digests == ["b", "c"]
    assert {pool.slot("b"), pool.slot("c")} == {0, 1}


def test_an_adapter_above_the_budget_fails(make_pool: MakePool) -> None:
    pool = make_pool(3)
    pool.bring("small")
    pool.bring("huge", rank=4)
    assert pool.state(ref("huge")) is FAILED
    assert isinstance(pool.take_error(ref("huge")), AdapterTooLarge)
    assert pool.resident_digests == ["small"]


def test_a_budget_of_nothing_refuses_adapters(make_pool: MakePool) -> None:
    pool = make_pool(0)
    assert pool.prefetch(ref("a"))
    assert isinstance(pool.take_error(ref("a")), AdapterLoadFailed)
    assert pool.source.loads == []


def test_repeated_non_finite_rows_quarantine(make_pool: MakePool) -> None:
    pool = make_pool(3)
    pool.bring("a")
    pool.pin(ref("a"))
    pool.report_non_finite(ref("a"))
    assert pool.state(ref("a")) is RESIDENT and pool.quarantined == []
    pool.report_non_finite(ref("a"))
    assert pool.state(ref("a")) is QUARANTINED and pool.quarantined == [ref("a").key]
    for _ in range(2):
        assert isinstance(pool.take_error(ref("a")), AdapterQuarantined)
    pool.unpin(ref("a"))
    assert pool.num_pinned == 0 and pool.state(ref("a", b"another tenant")) is ABSENT


def test_two_tenants_share_no_adapter_of_one_digest(make_pool: MakePool) -> None:
    pool = make_pool(3)
    for namespace in (b"t", b"u"):
        pool.prefetch(ref("a", namespace))
        pool.wait()
    slots = pool.slots()
    assert slots.keys() == {(b"t", "a"), (b"u", "a")} and len(set(slots.values())) == 2


def test_the_memory_of_faults_is_bounded(make_pool: MakePool) -> None:
    pool = make_pool(2, max_faulty=3)
    for digest in ("old", "old", "b", "c", "c", "d"):
        pool.report_non_finite(ref(digest))
    states = {digest: pool.state(ref(digest)) for digest in ("old", "b", "c", "d")}
    assert states == {"old": ABSENT, "b": ABSENT, "c": QUARANTINED, "d": ABSENT}


def test_slots_are_seen_without_being_copied(make_pool: MakePool) -> None:
    pool = make_pool(3)
    slots = pool.slots()
    pool.bring("a")
    assert dict(slots) == {(b"t", "a"): pool.slot("a")}
    with pytest.raises(TypeError):
        slots[b"t", "b"] = 1  # type: ignore[index]


def test_a_forgotten_tenant_leaves_the_device_and_the_host(make_pool: MakePool) -> None:
    pool = make_pool(10, host_ranks=10)
    for digest in "ab":
        pool.bring(digest)
    pool.pin(ref("b"))
    pool.forget(b"another tenant")
    assert pool.resident_digests == ["a", "b"]
    pool.forget(ref("a").namespace)
    assert pool.resident_digests == ["b"] and pool.host.nbytes == 0
    pool.unpin(ref("b"))
    pool.forget(ref("b").namespace)
    assert pool.resident_digests == [] and pool.resident_bytes == 0
    pool.bring("a")
    assert pool.host.num_hits == 0
