"""Prefix sharing: roots keep tenants apart, only full blocks are shared, and every state of the pool is accounted for."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loraplex.engine.batch.block_hash import HashChain
from loraplex.engine.kv_cache.block_pool import BlockPool
from loraplex.engine.kv_cache.prefix_cache import PrefixCache
from loraplex.engine.messages import AdapterRef

SIZE = 4


def make_cache(num_blocks: int = 16, enabled: bool = True, key: bytes | None = None) -> PrefixCache:
    pool = BlockPool(num_blocks)
    return PrefixCache(pool, SIZE, model_digest="m", cache_dtype="float32", enabled=enabled, key=key)


def fill(cache: PrefixCache, chain: HashChain, tokens: list[int]) -> list[int]:
    """Compute and publish the full blocks of `tokens`, then give them back."""
    blocks = cache.allocate(len(tokens) // SIZE, chain.namespace)
    assert blocks is not None
    table = [cache.register(chain, index, block, tokens) for index, block in enumerate(blocks)]
    cache.release(table)
    return table


def adapter(namespace: bytes, digest: str) -> AdapterRef:
    return AdapterRef(namespace=namespace, digest=digest, blob_path="")


def test_the_longest_run_of_full_blocks_is_found() -> None:
    cache = make_cache()
    tokens = list(range(12))
    blocks = fill(cache, cache.chain(b"a"), tokens)
    assert cache.match(cache.chain(b"a"), [*tokens, 99]) == blocks
    assert cache.match(cache.chain(b"a"), [*tokens[:8], 77, 78, 79, 80, 81]) == blocks[:2]
    assert cache.match(cache.chain(b"a"), [5, *tokens[1:]]) == []


def test_at_least_one_token_is_left_to_compute() -> None:
    cache = make_cache()
    tokens = list(range(8))
    blocks = fill(cache, cache.chain(b"a"), tokens)
    assert cache.match(cache.chain(b"a"), tokens) == blocks[:1]
    assert cache.match(cache.chain(b"a"), tokens[:4]) == []


@pytest.mark.parametrize(
    ("namespace", "ref", "salt"),
    [
        (b"b", None, b""),
        (b"", None, b""),
        (b"a", adapter(b"a", "d1"), b""),
        (b"a", None, b"s"),
        (b"as", None, b""),
    ],
)
def test_another_tenant_adapter_or_salt_finds_nothing(
    namespace: bytes, ref: AdapterRef | None, salt: bytes
) -> None:
    cache = make_cache()
    tokens = list(range(12))
    fill(cache, cache.chain(b"a"), tokens)
    assert cache.match(cache.chain(namespace, ref, salt), tokens) == []


def test_every_field_of_the_root_counts_and_borders_between_fields_too() -> None:
    cache = make_cache(key=b"k")
    chains = [
        cache.chain(b"a"),
        cache.chain(b"a", adapter(b"a", "d")),
        cache.chain(b"a", adapter(b"b", "d")),
        cache.chain(b"a", adapter(b"a", "e")),
        cache.chain(b"a", None, b"d"),
        cache.chain(b"ad"),
        make_cache(key=b"other").chain(b"a"),
        PrefixCache(cache.pool, SIZE, model_digest="n", cache_dtype="float32", key=b"k").chain(b"a"),
        PrefixCache(cache.pool, SIZE, model_digest="m", cache_dtype="bfloat16", key=b"k").chain(b"a"),
    ]
    assert len({chain.root for chain in chains}) == len(chains)
    assert make_cache(key=b"k").chain(b"a").root == cache.chain(b"a").root


def test_eviction_cuts_the_oldest_chain_from_its_end() -> None:
    cache = make_cache(num_blocks=6)
    old, young = list(range(12)), list(range(100, 112))
    fill(cache, cache.chain(b"a"), old)
    fill(cache, cache.chain(b"a"), young)
    assert cache.allocate(1, b"a") is not None
    assert len(cache.match(cache.chain(b"a"), [*old, 1])) == 2
    assert len(cache.match(cache.chain(b"a"), [*young, 1])) == 3


def test_a_tenant_that_floods_the_cache_evicts_itself() -> None:
    cache = make_cache(num_blocks=8)
    quiet = list(range(12))
    kept = fill(cache, cache.chain(b"quiet"), quiet)
    for start in range(100, 1000, 8):
        fill(cache, cache.chain(b"flood"), list(range(start, start + 8)))
    assert cache.match(cache.chain(b"quiet"), [*quiet, 1]) == kept


def test_allocation_is_all_or_nothing() -> None:
    cache = make_cache(num_blocks=4)
    assert cache.allocate(5, b"a") is None
    assert cache.pool.num_free == 4


def test_equal_blocks_computed_twice_become_one() -> None:
    cache = make_cache()
    tokens = list(range(4))
    first, second = cache.allocate(1, b"a"), cache.allocate(1, b"a")
    assert first is not None and second is not None
    assert cache.register(cache.chain(b"a"), 0, first[0], tokens) == first[0]
    assert cache.register(cache.chain(b"a"), 0, second[0], tokens) == first[0]
    assert (cache.pool.references(first[0]), cache.pool.references(second[0])) == (2, 0)


def test_forgotten_blocks_are_not_found_again() -> None:
    cache = make_cache()
    tokens = list(range(8))
    blocks = fill(cache, cache.chain(b"a"), tokens)
    cache.forget(blocks[:1])
    assert cache.match(cache.chain(b"a"), [*tokens, 1]) == []
    cache.clear()
    assert cache.pool.num_free == cache.pool.total


def test_a_forgotten_tenant_leaves_no_block_and_others_keep_theirs() -> None:
    cache = make_cache()
    tokens = list(range(8))
    fill(cache, cache.chain(b"a"), tokens)
    fill(cache, cache.chain(b"a", adapter(b"a", "d"), b"salt"), tokens)
    others = fill(cache, cache.chain(b"b"), tokens)
    in_use = cache.match(cache.chain(b"a"), [*tokens, 1])
    cache.forget_namespace(b"a")
    assert cache.pool.num_cached == len(others)
    assert cache.match(cache.chain(b"a"), [*tokens, 1]) == []
    assert cache.pool.num_referenced == len(in_use)
    cache.release(in_use)
    assert cache.pool.num_free == cache.pool.total - len(others)
    assert cache.match(cache.chain(b"b"), [*tokens, 1]) == others


def test_switched_off_it_keeps_nothing() -> None:
    cache = make_cache(enabled=False)
    tokens = list(range(8))
    fill(cache, cache.chain(b"a"), tokens)
    assert cache.match(cache.chain(b"a"), [*tokens, 1]) == []
    assert cache.pool.num_free == cache.pool.total


class CacheMachine(RuleBasedStateMachine):
    """Tables opened, grown, forked and closed in any order over a small pool and two tenants."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(num_blocks=8)
        self.tables: list[tuple[bytes, HashChain, list[int], list[int]]] = []
        self.content: dict[int, tuple[bytes, tuple[int, ...]]] = {}

    @rule(tenant=st.sampled_from([b"a", b"b"]), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def open(self, tenant: bytes, tokens: list[int]) -> None:
        chain = self.cache.chain(tenant)
        matched = self.cache.match(chain, tokens)
        for index, block in enumerate(matched):
            assert self.content[block] == (tenant, tuple(tokens[: (index + 1) * SIZE]))
        assert len(matched) * SIZE < len(tokens)
        fresh = self.cache.allocate(-(-len(tokens) // SIZE) - len(matched), tenant)
        if fresh is None:
            self.cache.release(matched)
            return
        table = matched + fresh
        for index in range(len(matched), len(tokens) // SIZE):
            self.content[table[index]] = (tenant, tuple(tokens[: (index + 1) * SIZE]))
            table[index] = self.cache.register(chain, index, table[index], tokens)
        self.tables.append((tenant, chain, tokens, table))

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if self.tables:
            tenant, chain, tokens, table = data.draw(st.sampled_from(self.tables))
            full = len(tokens) // SIZE
            self.cache.share(table[:full])
            self.tables.append((tenant, chain.fork(full), tokens[: full * SIZE], table[:full]))

    @rule(data=st.data(), forget=st.booleans())
    def close(self, data: st.DataObject, forget: bool) -> None:
        if self.tables:
            index = data.draw(st.integers(0, len(self.tables) - 1))
            *_, table = self.tables.pop(index)
            if forget:
                self.cache.forget(table)
            self.cache.release(table)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        pool = self.cache.pool
        assert pool.num_free + pool.num_cached + pool.num_referenced == pool.total
        held = Counter(block for *_, table in self.tables for block in table)
        assert all(pool.references(block) == held[block] for block in range(pool.total))

    @invariant()
    def only_equal_full_blocks_are_shared(self) -> None:
        seen: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        for tenant, _, tokens, table in self.tables:
            for index, block in enumerate(table):
                prefix = (tenant, tuple(tokens[: (index + 1) * SIZE]))
                assert seen.setdefault(block, prefix) == prefix
                if self.cache.pool.references(block) > 1:
                    assert len(prefix[1]) == (index + 1) * SIZE


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
