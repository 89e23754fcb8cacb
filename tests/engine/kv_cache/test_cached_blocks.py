"""Which cached block is evicted: that of an idle tenant, or of the one with the most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.kv_cache.cached_blocks import IDLE_S, CachedBlocks


class Clock:
    """A clock that stands until it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def cached(**blocks: list[int]) -> CachedBlocks:
    cache = CachedBlocks(Clock())
    for tenant, owned in blocks.items():
        for block in owned:
            cache.add(block, tenant.encode())
    return cache


def evict(cache: CachedBlocks, requester: bytes) -> int:
    block = cache.next_victim(requester)
    cache.remove(block)
    return block


def test_the_tenant_with_the_most_blocks_gives_way_no_matter_who_asks() -> None:
    cache = cached(small=[1, 2], large=[3, 4, 5, 6])
    assert [evict(cache, b"small") for _ in range(2)] == [3, 4]


def test_of_equal_tenants_the_requester_pays() -> None:
    cache = cached(a=[1, 2], b=[3, 4])
    assert evict(cache, b"b") == 3
    assert evict(cache, b"b") == 1


def test_blocks_of_an_idle_tenant_go_first() -> None:
    clock = Clock()
    cache = CachedBlocks(clock)
    cache.add(1, b"idle")
    clock.now = IDLE_S + 1
    for block in (2, 3):
        cache.add(block, b"busy")
    assert evict(cache, b"busy") == 1
    assert evict(cache, b"busy") == 2


def test_a_tenant_that_finds_its_blocks_is_not_idle() -> None:
    clock = Clock()
    cache = CachedBlocks(clock)
    for block in (1, 2):
        cache.add(block, b"reader")
    for block in (3, 4, 5):
        cache.add(block, b"writer")
    clock.now = IDLE_S
    cache.reuse(1)
    clock.now = IDLE_S + 1
    assert evict(cache, b"reader") == 3, "the writer is idle, the reader is not"


def test_without_cached_blocks_there_is_no_victim() -> None:
    with pytest.raises(StopIteration):
        CachedBlocks(Clock()).next_victim(b"a")


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    evictions=st.lists(st.integers(0, 5), max_size=60),
)
def test_no_tenant_loses_a_block_while_another_has_more(sizes: list[int], evictions: list[int]) -> None:
    """The counts are compared with a model that sorts; a tenant never falls below the equal share of what is left."""
    cache, counts = CachedBlocks(Clock()), dict(enumerate(sizes))
    owners: dict[int, int] = {}
    for tenant, size in counts.items():
        for _ in range(size):
            block = len(owners)
            owners[block] = tenant
            cache.add(block, bytes([tenant]))
    for requester in evictions[: len(owners)]:
        victim = owners[evict(cache, bytes([requester]))]
        assert counts[victim] == max(counts.values())
        counts[victim] -= 1
    left = len(cache)
    assert left == sum(counts.values())
    assert all(counts[tenant] >= min(size, left // len(sizes)) for tenant, size in enumerate(sizes))
