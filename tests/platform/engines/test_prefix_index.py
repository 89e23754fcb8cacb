"""Prefixes of one tenant: found where they were sent, never by another tenant, and never pushed out by a busier one."""

from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.messages import AdapterKey
from loraplex.platform.engines.prefix_index import ENTRY_BYTES, PrefixIndex, PromptPrefix, prompt_prefixes

ONE, OTHER = b"1" * 32, b"2" * 32
ADAPTER: AdapterKey = (ONE, "a" * 64)
TOKENS = list(range(300))


def prefix(number: int) -> PromptPrefix:
    return PromptPrefix(0.5, number.to_bytes(16, "big"))


def test_the_longest_common_prefix_counts() -> None:
    index = PrefixIndex(2**20)
    index.record(ONE, prompt_prefixes(ONE, None, b"", TOKENS), "a")
    index.record(ONE, prompt_prefixes(ONE, None, b"", [*TOKENS[:200], *[7] * 100]), "b")
    assert index.shares(ONE, prompt_prefixes(ONE, None, b"", TOKENS)) == {"a": 256 / 300, "b": 128 / 300}
    assert index.shares(ONE, prompt_prefixes(ONE, None, b"", [5, *TOKENS])) == {}
    assert prompt_prefixes(ONE, None, b"", TOKENS[:63]) == []


@given(st.lists(st.integers(0, 2**17), min_size=64, max_size=300), st.binary(max_size=8))
def test_no_prefix_matches_another_tenant_adapter_or_salt(tokens: list[int], salt: bytes) -> None:
    def digests_of(namespace: bytes, adapter: AdapterKey | None, cache_salt: bytes) -> set[bytes]:
        return {each.digest for each in prompt_prefixes(namespace, adapter, cache_salt, tokens)}

    digests = [
        digests_of(ONE, None, salt),
        digests_of(OTHER, None, salt),
        digests_of(ONE, ADAPTER, salt),
        digests_of(ONE, None, salt + b"x"),
        digests_of(OTHER, ADAPTER, salt),
    ]
    assert all(digests) and len(set.union(*digests)) == sum(map(len, digests))


def test_a_lookup_sees_its_own_tenant_only() -> None:
    index = PrefixIndex(2**20)
    index.record(ONE, [prefix(1)], "a")
    assert index.shares(OTHER, [prefix(1)]) == {}


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.sampled_from("ab")), max_size=120),
)
def test_a_tenant_within_its_fair_share_loses_nothing(size: int, sent: list[tuple[int, int, str]]) -> None:
    index = PrefixIndex(size * ENTRY_BYTES)
    newest: dict[int, dict[int, str]] = {}
    for tenant, number, replica in sent:
        index.record(b"%d" % tenant, [prefix(number)], replica)
        newest.setdefault(tenant, {})[number] = replica
        assert index.size_bytes <= size * ENTRY_BYTES
    for tenant, numbers in newest.items():
        if len(numbers) <= size // len(newest):
            assert all(replica in index.shares(b"%d" % tenant, [prefix(n)]) for n, replica in numbers.items())


def test_a_prefix_remembers_its_newest_replicas() -> None:
    index = PrefixIndex(2**20)
    for replica in "abcabde":
        index.record(ONE, [prefix(1)], replica)
    assert list(index.shares(ONE, [prefix(1)])) == ["e", "d", "b", "a"]
