"""Loads run on a thread of their own, bounded in bytes, and nothing a source does ends it. The host cache avoids a second
load.
"""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from tests.engine.lora.driven_pool import (
    ABSENT,
    FAILED,
    INPUTS,
    LOADING,
    RANK_BYTES,
    RESIDENT,
    TIMEOUT_S,
    DrivenPool,
    paged,
    ref,
    weights,
)

from loraplex.engine.errors import AdapterLoadFailed
from loraplex.engine.lora.load_budget import LOADS_AT_FIRST
from loraplex.engine.lora.memory.packed_adapter import PackedAdapter
from loraplex.engine.lora.weights import LoraWeights

MakePool = Callable[..., DrivenPool]


def test_a_load_runs_on_its_own_thread_and_is_installed_by_poll(make_pool: MakePool) -> None:
    pool = make_pool(4)
    pool.source.hold("a")
    assert pool.state(ref("a")) is ABSENT
    assert pool.prefetch(ref("a")) and pool.prefetch(ref("a"))
    pool.poll()
    assert pool.state(ref("a")) is LOADING
    pool.source.release("a")
    assert pool.on_loaded.wait(TIMEOUT_S)
    assert pool.state(ref("a")) is LOADING, "only poll installs"
    pool.poll()
    assert pool.state(ref("a")) is RESIDENT
    assert pool.source.loads == ["a"] and pool.source.threads == {"adapter-loader"}


@pytest.mark.parametrize(
    "error", [AdapterLoadFailed("gone"), RuntimeError("a defect"), MemoryError()], ids=repr
)
def test_a_failing_source_fails_one_adapter_and_may_be_retried(make_pool: MakePool, error: Exception) -> None:
    pool = make_pool(3)
    pool.source.errors["a"] = error
    pool.bring("a")
    assert pool.state(ref("a")) is FAILED and pool.num_load_failures == 1
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
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, wrong: LoraWeights, message: str
) -> None:
    pool = make_pool(100)
    monkeypatch.setattr(pool.source, "load", lambda adapter: wrong)
    pool.prefetch(ref("a"))
    pool.wait()
    with pytest.raises(AdapterLoadFailed, match=message):
        raise pool.take_error(ref("a"))


def test_loads_under_way_are_bounded_in_bytes(make_pool: MakePool) -> None:
    """Before any size is known a few may begin; then as many as their mean size allows: of one tenant, half of them."""
    pool = make_pool(1, under_way=6 * 64)
    digests = [f"d{i}" for i in range(LOADS_AT_FIRST // 2)]
    for digest in digests:
        pool.source.hold(digest)
        assert pool.prefetch(ref(digest))
    assert not pool.prefetch(ref("one more")) and pool.state(ref("one more")) is ABSENT
    for digest in digests:
        pool.source.release(digest)
    while any(pool.state(ref(digest)) is LOADING for digest in digests):
        pool.wait() if pool._loading else pool.poll()
    pool.pin(ref(pool.resident_digests[0]))
    started = 0
    while pool.prefetch(ref(f"e{started}")):
        started += 1
    assert started == 3, "a blob of rank 1 has 64 bytes"


def test_the_loader_stops_while_too_much_waits_for_room(make_pool: MakePool) -> None:
    """Sizes were guessed too small: what the next loads bring is bounded all the same."""
    pool = make_pool(4, under_way=3 * 64)
    pool.bring("pinned", rank=4)
    pool.pin(ref("pinned"))
    for index in range(3):
        pool.budget.learn((b"t", str(index)), 1)
        pool.budget._mean = 1.0
        pool.source.ranks[str(index)] = 4
        assert pool.prefetch(ref(str(index)))
    pool.wait()
    pool.prefetch(ref("last"))
    assert not pool.on_loaded.wait(0.05) and pool.source.loads == ["pinned", "0"]
    pool.unpin(ref("pinned"))
    pool.poll()
    pool.wait()
    assert pool.source.loads[:3] == ["pinned", "0", "1"]


def test_one_load_may_always_begin(make_pool: MakePool) -> None:
    pool = make_pool(9, under_way=1)
    for digest in ("a", "b"):
        pool.bring(digest, rank=4)
    assert pool.resident_digests == ["a", "b"]
    pool.source.hold("c")
    assert pool.prefetch(ref("c")) and not pool.prefetch(ref("d"))


def test_a_load_without_waiting_sequences_gives_its_place_back(make_pool: MakePool) -> None:
    pool = make_pool(1, under_way=1)
    pool.bring("pinned")
    pool.pin(ref("pinned"))
    assert pool.prefetch(ref("d"))
    pool.wait()
    assert pool.state(ref("d")) is LOADING and not pool.prefetch(ref("wanted"))
    pool.abandon(ref("d"))
    assert pool.state(ref("d")) is ABSENT
    assert pool.prefetch(ref("wanted"))


@pytest.mark.parametrize("is_broken", [False, True])
def test_an_abandoned_load_evicts_no_adapter_and_leaves_no_error(
    make_pool: MakePool, is_broken: bool
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


def test_an_abandoned_load_is_kept_where_there_is_room(make_pool: MakePool) -> None:
    pool = make_pool(2)
    pool.source.hold("gone")
    pool.prefetch(ref("gone"))
    pool.abandon(ref("gone"))
    pool.source.release("gone")
    pool.wait()
    assert pool.state(ref("gone")) is RESIDENT


def test_an_error_that_no_sequence_takes_is_forgotten(make_pool: MakePool) -> None:
    pool = make_pool(2)
    pool.source.errors["a"] = AdapterLoadFailed("broken")
    pool.bring("a")
    pool.abandon(ref("a"))
    assert pool.state(ref("a")) is ABSENT


def test_who_left_the_device_comes_back_from_host_memory(make_pool: MakePool) -> None:
    pool = make_pool(100, memory=paged, max_slots=1, host_ranks=100)
    for digest in "aba":
        pool.bring(digest, rank=2)
    assert pool.source.loads == ["a", "b"]
    assert (pool.num_loads, pool.num_evictions, pool.host.num_hits) == (3, 2, 1)
    assert pool.host.nbytes <= 100 * RANK_BYTES and pool.state(ref("a")) is RESIDENT


def test_the_tier_is_where_an_adapter_comes_from(make_pool: MakePool) -> None:
    pool = make_pool(100, memory=paged, max_slots=1, host_ranks=100)
    assert (pool.tier(ref("a")), pool.size_bytes(ref("a"))) == ("disk", 0)
    pool.source.hold("a")
    pool.prefetch(ref("a"))
    assert (pool.state(ref("a")), pool.tier(ref("a"))) == (LOADING, "disk")
    pool.source.release("a")
    pool.bring("a")
    assert pool.tier(ref("a")) == "device" and pool.size_bytes(ref("a")) >= RANK_BYTES
    pool.bring("b")
    assert (pool.state(ref("a")), pool.tier(ref("a"))) == (ABSENT, "host")


def test_a_load_from_host_memory_costs_less_than_one_from_the_source(make_pool: MakePool) -> None:
    pool = make_pool(100, memory=paged, max_slots=1, host_ranks=100)
    guess = pool.load_seconds(ref("a"))
    assert guess > 0
    pool.bring("a", rank=2)
    read = pool.load_seconds(ref("a"))
    pool.bring("b", rank=2)
    assert pool.state(ref("a")) is ABSENT
    assert 0 < pool.load_seconds(ref("a")) < pool.load_seconds(ref("c")) and read > 0


def test_a_blob_leaves_host_memory_when_its_pages_are_on_the_device(make_pool: MakePool) -> None:
    """Without a host cache nothing uses it any more; its report stays."""
    pool = make_pool(100, memory=paged)
    blobs: list[weakref.ref[torch.Tensor]] = []
    pack = pool.memory.pack

    def noted(adapter: LoraWeights) -> PackedAdapter:
        packed = pack(adapter)
        blobs.append(weakref.ref(packed.blob))
        return packed

    pool._loader._pack = noted  # type: ignore[attr-defined]
    pool.bring("a", rank=9)
    assert pool.state(ref("a")) is RESIDENT and pool.num_loads == 1
    gc.collect()
    assert [blob() for blob in blobs] == [None]
