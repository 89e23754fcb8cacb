"""`HostTier`: bounded by bytes, least recently found first."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.lora.host_tier import HostTier
from loraplex.engine.lora.packed import PackedAdapter
from loraplex.engine.lora.table_rows import table_rows


def blob(nbytes: int) -> PackedAdapter:
    return PackedAdapter("d", torch.zeros(0), (), {}, table_rows({}, (), 1), (), {}, nbytes, nbytes, None)


def key(name: str) -> tuple[bytes, str]:
    return (b"t", name)


def test_the_least_recently_found_goes_first() -> None:
    tier = HostTier(10)
    first, second = blob(4), blob(4)
    tier.keep(key("a"), first)
    tier.keep(key("b"), second)
    assert tier.find(key("a")) is first
    tier.keep(key("c"), blob(4))
    assert (key("a") in tier, key("b") in tier, key("c") in tier) == (True, False, True)
    assert (tier.nbytes, tier.num_hits, tier.find(key("b"))) == (8, 1, None)


def test_what_is_larger_than_the_tier_drives_nobody_out() -> None:
    tier = HostTier(10)
    tier.keep(key("a"), blob(4))
    tier.keep(key("b"), blob(11))
    assert len(tier) == 1 and key("a") in tier
    HostTier(0).keep(key("a"), blob(1))


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12)), max_size=40))
def test_bytes_are_those_of_what_is_kept(steps: list[tuple[str, int]]) -> None:
    tier = HostTier(20)
    for name, nbytes in steps:
        tier.keep(key(name), blob(nbytes)) if nbytes else tier.forget(key(name))
        assert tier.nbytes == sum(packed.host_nbytes for packed in tier._kept.values()) <= 20
