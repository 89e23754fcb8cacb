"""The cache of compiled grammars: one build per key, and no tenant pays for another."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.grammar.backends.compiler import CompiledCache


@dataclass(frozen=True)
class Grammar:
    size_bytes: int


class Builds:
    """A `build` that counts."""

    def __init__(self, size: int = 10) -> None:
        self.count = 0
        self._size = size

    def __call__(self) -> Grammar:
        self.count += 1
        return Grammar(self._size)


def refuse() -> Grammar:
    raise AssertionError("built again")


def test_a_key_is_built_once_per_tenant() -> None:
    cache: CompiledCache[Grammar] = CompiledCache(100, 100)
    first, second = Builds(), Builds()
    assert cache.get(b"a", "key", first) is cache.get(b"a", "key", refuse)
    assert cache.get(b"b", "key", second) is not cache.get(b"a", "key", refuse)
    assert (first.count, second.count, cache.size_bytes) == (1, 1, 20)


def test_threads_that_ask_together_wait_for_one_build() -> None:
    cache: CompiledCache[Grammar] = CompiledCache(100, 100)
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> Grammar:
        begun.set()
        assert go_on.wait(10)
        return Grammar(1)

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(cache.get, b"a", "key", slow)
        assert begun.wait(10)
        others = [pool.submit(cache.get, b"a", "key", refuse) for _ in range(3)]
        assert cache.get(b"b", "key", Builds(2)).size_bytes == 2
        go_on.set()
        assert len({id(each.result(10)) for each in (first, *others)}) == 1


def test_a_failed_build_is_told_to_all_who_wait_and_not_kept() -> None:
    cache: CompiledCache[Grammar] = CompiledCache(100, 100)
    begun, go_on = threading.Event(), threading.Event()

    def failing() -> Grammar:
        begun.set()
        assert go_on.wait(10)
        raise ValueError("no grammar")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, b"a", "key", failing)
        assert begun.wait(10)
        other = pool.submit(cache.get, b"a", "key", failing)
        go_on.set()
        for each in (first, other):
            with pytest.raises(ValueError, match="no grammar"):
                each.result(10)
    assert cache.get(b"a", "key", Builds()).size_bytes == 10


def test_the_least_recently_used_of_the_tenant_goes() -> None:
    cache: CompiledCache[Grammar] = CompiledCache(1000, 30)
    for key in "abc":
        cache.get(b"t", key, Builds())
    cache.get(b"t", "a", refuse)
    cache.get(b"t", "d", Builds())
    for key in "acd":
        cache.get(b"t", key, refuse)
    again = Builds()
    cache.get(b"t", "b", again)
    assert again.count == 1


def test_a_tenant_that_fills_the_cache_evicts_its_own() -> None:
    cache: CompiledCache[Grammar] = CompiledCache(100, 90)
    for key in range(3):
        cache.get(b"modest", key, Builds())
    for key in range(100):
        cache.get(b"greedy", key, Builds())
    for key in range(3):
        cache.get(b"modest", key, refuse)
    assert cache.size_bytes <= 100


def test_what_is_too_large_is_not_kept() -> None:
    cache: CompiledCache[Grammar] = CompiledCache(100, 50)
    cache.get(b"a", "small", Builds(50))
    assert cache.get(b"a", "large", Builds(51)).size_bytes == 51
    cache.get(b"a", "small", refuse)
    assert cache.size_bytes == 50


requests = st.lists(
    st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 9), st.integers(1, 40)), max_size=60
)


@given(requests)
def test_no_tenant_within_its_fair_share_loses_to_another(asked: list[tuple[bytes, int, int]]) -> None:
    most = 100
    cache: CompiledCache[Grammar] = CompiledCache(most, most)
    held: dict[bytes, dict[int, int]] = {}
    for namespace, key, size in asked:
        sizes_before = {tenant: sum(keys.values()) for tenant, keys in held.items()}
        kept = cache.get(namespace, key, _remember(held, namespace, key, size)).size_bytes
        for tenant in [each for each in held if each != namespace]:
            if sizes_before[tenant] <= most / len({*held, namespace}):
                assert all(_has(cache, tenant, each) for each in held[tenant])
        held = {
            tenant: {each: bytes_ for each, bytes_ in keys.items() if _has(cache, tenant, each)}
            for tenant, keys in held.items()
        }
        held = {tenant: keys for tenant, keys in held.items() if keys}
        assert cache.size_bytes == sum(sum(keys.values()) for keys in held.values()) <= most
        assert kept == held.get(namespace, {}).get(key, kept)


def _remember(
    held: dict[bytes, dict[int, int]], namespace: bytes, key: int, size: int
) -> Callable[[], Grammar]:
    def build() -> Grammar:
        held.setdefault(namespace, {})[key] = size
        return Grammar(size)

    return build


class _Absent(Exception):
    pass


def _has(cache: CompiledCache[Grammar], namespace: bytes, key: int) -> bool:
    def absent() -> Grammar:
        raise _Absent

    try:
        cache.get(namespace, key, absent)
    except _Absent:
        return False
    return True
