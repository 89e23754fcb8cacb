"""The largest tenant is that of a model that looks at all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.kv_cache.tenant_sizes import TenantSizes


def test_of_equal_tenants_the_preferred_one_or_the_first() -> None:
    sizes = TenantSizes()
    for namespace in (b"a", b"b"):
        sizes.change(namespace, 3)
    assert (sizes.largest(), sizes.largest(b"b"), sizes.largest(b"c")) == (b"a", b"b", b"a")
    sizes.change(b"a", -3)
    sizes.change(b"b", -3)
    with pytest.raises(KeyError):
        sizes.largest()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-5, 8)), max_size=60))
def test_it_is_the_largest_of_all(changes: list[tuple[int, int]]) -> None:
    sizes, counts = TenantSizes(), dict.fromkeys(range(5), 0)
    for tenant, by in changes:
        by = max(by, -counts[tenant])
        counts[tenant] += by
        sizes.change(bytes([tenant]), by)
        if any(counts.values()):
            assert counts[sizes.largest()[0]] == max(counts.values())
