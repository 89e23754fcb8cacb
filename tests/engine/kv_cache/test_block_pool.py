"""The pool's three states and its refusals."""

import pytest

from loraplex.engine.kv_cache.block_pool import BlockPool


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_referenced


def test_a_block_goes_from_free_to_referenced_to_cached_to_free() -> None:
    pool = BlockPool(2)
    block = pool.take()
    assert counts(pool) == (1, 0, 1)
    pool.retain(block)
    pool.release(block, owner=b"a")
    assert counts(pool) == (1, 0, 1)
    pool.release(block, owner=b"a")
    assert counts(pool) == (1, 1, 0)
    assert pool.evict(b"a") == block
    assert counts(pool) == (2, 0, 0)


def test_all_blocks_are_usable() -> None:
    pool = BlockPool(3)
    assert sorted(pool.take() for _ in range(3)) == [0, 1, 2]
    with pytest.raises(ValueError, match="no block is free"):
        pool.take()


def test_of_one_tenant_the_oldest_released_block_is_evicted_first_and_a_reuse_makes_it_young() -> None:
    pool = BlockPool(3)
    first, second, third = (pool.take() for _ in range(3))
    for block in (first, second, third):
        pool.release(block, owner=b"a")
    pool.retain(first)
    pool.release(first, owner=b"a")
    assert [pool.evict(b"a") for _ in range(3)] == [second, third, first]


def test_misuse_is_refused() -> None:
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="not referenced"):
        pool.release(0, owner=b"a")
    with pytest.raises(ValueError, match="is free"):
        pool.retain(0)
    with pytest.raises(ValueError, match="cached"):
        pool.evict(b"a")
    with pytest.raises(ValueError, match="cached"):
        pool.free_cached(0)
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)
