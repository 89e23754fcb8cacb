"""`HostCache`: bounded by bytes, least recently found first."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loraplex.engine.lora.memory.host_cache import HostCache
from loraplex.engine.lora.memory.packed_adapter import PackedAdapter
from loraplex.engine.lora.memory.pinned_arena import PinnedArena
from loraplex.engine.lora.memory.slot_entries import table_rows


def blob(nbytes: int) -> PackedAdapter:
    return packed(torch.zeros(nbytes, dtype=torch.uint8))


def packed(blob: torch.Tensor) -> PackedAdapter:
    return PackedAdapter("d", blob, (), {}, table_rows({}, (), 1), {}, 0, None)


def key(name: str) -> tuple[bytes, str]:
    return (b"t", name)


def test_the_least_recently_found_goes_first() -> None:
    tier = HostCache(10)
    first, second = blob(4), blob(4)
    tier.keep(key("a"), first)
    tier.keep(key("b"), second)
    assert tier.find(key("a")) is first
    tier.keep(key("c"), blob(4))
    assert (key("a") in tier, key("b") in tier, key("c") in tier) == (True, False, True)
    assert tier.keys == [key("a"), key("c")]
    assert (tier.nbytes, tier.num_hits, tier.find(key("b"))) == (8, 1, None)


def test_a_blob_larger_than_the_cache_evicts_no_other() -> None:
    tier = HostCache(10)
    tier.keep(key("a"), blob(4))
    tier.keep(key("b"), blob(11))
    assert len(tier) == 1 and key("a") in tier
    HostCache(0).keep(key("a"), blob(1))


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12)), max_size=40))
def test_bytes_are_those_of_what_is_kept(steps: list[tuple[str, int]]) -> None:
    tier = HostCache(20)
    for name, nbytes in steps:
        tier.keep(key(name), blob(nbytes)) if nbytes else tier.forget(key(name))
        assert tier.nbytes == sum(kept.blob.nbytes for kept in tier._blobs.values()) <= 20


def test_in_an_arena_the_tier_makes_room_for_a_blob_before_it_is_loaded() -> None:
    arena = PinnedArena(64, pinned=False)
    tier = HostCache(64, arena)
    for name in "abc":
        tier.keep(key(name), packed(tier.blob(24)))
    assert (len(tier), key("a") in tier, tier.nbytes) == (2, False, 48)
    held = [tier.blob(24)]
    assert (len(tier), key("b") in tier) == (1, False)
    held.append(tier.blob(60))
    assert len(tier) == 0 and not arena.owns(held[1]), (
        "what is held cannot be driven out: beside the arena then"
    )
    tier.keep(key("d"), packed(held[1]))
    assert len(tier) == 0
    tier.keep(key("e"), packed(held[0]))
    assert tier.find(key("e")) is not None


def test_a_blob_longer_than_a_chunk_evicts_no_other() -> None:
    arena = PinnedArena(64, pinned=False, chunk_bytes=32)
    tier = HostCache(64, arena)
    for name in "ab":
        tier.keep(key(name), packed(tier.blob(30)))
    large = tier.blob(40)
    assert large.shape == (40,) and not arena.owns(large)
    tier.keep(key("large"), packed(large))
    assert (len(tier), arena.longest, arena.capacity_bytes) == (2, 32, 64)


class ArenaMachine(RuleBasedStateMachine):
    """Any order of blobs made and let go."""

    @initialize(nbytes=st.integers(0, 200), chunk=st.sampled_from([16, 64]))
    def start(self, nbytes: int, chunk: int) -> None:
        self.arena = PinnedArena(nbytes, pinned=False, chunk_bytes=chunk)
        assert self.arena.capacity_bytes <= nbytes
        self.live: list[tuple[torch.Tensor, int]] = []
        self.number = 0

    @rule(nbytes=st.integers(0, 40))
    def make(self, nbytes: int) -> None:
        blob = self.arena.allocate(nbytes)
        if blob is None:
            assert self.live or all(nbytes > whole.nbytes for whole in self.arena._chunks)
            return
        assert self.arena.owns(blob) and blob.shape == (nbytes,)
        self.number = (self.number + 1) % 256
        blob[:] = self.number
        self.live.append((blob, self.number))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        del self.live[data.draw(st.integers(0, len(self.live) - 1))]

    @invariant()
    def no_blob_overwrites_another(self) -> None:
        assert all(bool((blob == number).all()) for blob, number in self.live)

    def teardown(self) -> None:
        """Everything comes together again."""
        self.live.clear()
        whole = [self.arena.allocate(chunk.nbytes) for chunk in self.arena._chunks]
        assert all(blob is not None for blob in whole)


ArenaMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestArenaMachine = ArenaMachine.TestCase
