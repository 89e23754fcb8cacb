"""The LRU cache per tenant and its byte limits."""

from dataclasses import dataclass
from operator import attrgetter

from hypothesis import given
from hypothesis import strategies as st

from loraplex.grammar.tenant_cache import TenantCache

ENTRY_BYTES = 512


def result(text: str = "") -> str:
    return text


def cached_bytes(result: str) -> int:
    return ENTRY_BYTES + len(result.encode())


def results(max_bytes: int, max_tenant_bytes: int) -> TenantCache[str]:
    return TenantCache(max_bytes, max_tenant_bytes, cached_bytes)


def test_a_tenant_sees_its_own_only() -> None:
    cache = results(ENTRY_BYTES * 4, ENTRY_BYTES * 4)
    cache.put(b"a", b"1", result())
    assert cache.get(b"a", b"1") == result()
    assert cache.get(b"b", b"1") is None


def test_a_tenant_at_its_bound_forgets_its_own_oldest() -> None:
    cache = results(ENTRY_BYTES * 10, ENTRY_BYTES * 2)
    cache.put(b"b", b"0", result())
    for key in (b"1", b"2"):
        cache.put(b"a", key, result())
    cache.get(b"a", b"1")
    cache.put(b"a", b"3", result())
    assert [cache.get(b"a", key) is not None for key in (b"1", b"2", b"3")] == [True, False, True]
    assert cache.get(b"b", b"0") is not None


def test_the_largest_tenant_is_evicted_first() -> None:
    cache = results(ENTRY_BYTES * 4, ENTRY_BYTES * 4)
    cache.put(b"quiet", b"0", result())
    for key in range(20):
        cache.put(b"flood", bytes([key]), result())
    assert cache.get(b"quiet", b"0") is not None
    assert cache.size_bytes == ENTRY_BYTES * 4


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.text(max_size=900))))
def test_bytes_are_counted_and_bounded(puts: list[tuple[int, int, str]]) -> None:
    cache = results(ENTRY_BYTES * 5, ENTRY_BYTES * 3)
    for tenant, key, text in puts:
        cache.put(bytes([tenant]), bytes([key]), result(text))
        held = {
            (t, k): found
            for t in range(3)
            for k in range(6)
            if (found := cache.get(bytes([t]), bytes([k]))) is not None
        }
        sizes = {place: cached_bytes(found) for place, found in held.items()}
        assert cache.size_bytes == sum(sizes.values()) <= ENTRY_BYTES * 5
        for t in range(3):
            assert sum(size for place, size in sizes.items() if place[0] == t) <= ENTRY_BYTES * 3


@dataclass
class Growing:
    size_bytes: int


def test_what_has_grown_is_counted_again_and_evicts_the_oldest() -> None:
    cache: TenantCache[Growing] = TenantCache(100, 60, attrgetter("size_bytes"))
    values = [Growing(10) for _ in range(3)]
    for key, value in enumerate(values):
        cache.put(b"a", key, value)
    cache.put(b"b", 0, Growing(30))
    values[1].size_bytes = 45
    assert cache.size_bytes == 60
    cache.reweigh(b"a", 1)
    assert [cache.get(b"a", key) for key in range(3)] == [None, *values[1:]]
    assert cache.size_bytes == 85 and cache.get(b"b", 0) is not None


def test_what_has_grown_above_the_bound_is_dropped() -> None:
    cache: TenantCache[Growing] = TenantCache(100, 60, attrgetter("size_bytes"))
    value = Growing(10)
    cache.put(b"a", 0, value)
    value.size_bytes = 61
    cache.reweigh(b"a", 0)
    cache.reweigh(b"a", 0)
    assert cache.get(b"a", 0) is None and cache.size_bytes == 0
