"""`group_rows`: the rows of a step by adapter slot, for any step."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.lora.batch import LARGE_GROUP, LoraGroups, group_rows

CPU = torch.device("cpu")

row_slots = st.lists(st.integers(-1, 6), max_size=80)


def members(groups: LoraGroups | None) -> dict[int, list[int]]:
    """Rows by slot, read from the tensors as a kernel reads them."""
    if groups is None:
        return {}
    starts = groups.starts.tolist()
    return {
        slot: groups.order[starts[g] : starts[g + 1]].tolist() for g, slot in enumerate(groups.slots.tolist())
    }


@given(row_slots)
def test_every_adapted_row_stands_in_its_group_and_no_other_does(slots: list[int]) -> None:
    batch = group_rows(slots, CPU)
    expected = {slot: [r for r, s in enumerate(slots) if s == slot] for slot in set(slots) - {-1}}
    assert (batch is None) == (not expected)
    if batch is not None:
        assert members(batch.groups) == expected
        assert batch.groups.num_rows == sum(slot >= 0 for slot in slots)


@given(row_slots)
def test_small_and_large_partition_the_groups(slots: list[int]) -> None:
    batch = group_rows(slots, CPU)
    if batch is None:
        return
    small, large = members(batch.small), members(batch.large)
    assert all(0 < len(rows) <= LARGE_GROUP for rows in small.values())
    assert all(len(rows) > LARGE_GROUP for rows in large.values())
    assert small.keys().isdisjoint(large) and small | large == members(batch.groups)
    assert (batch.small is None) == (not small) and (batch.large is None) == (not large)


@given(row_slots)
def test_host_and_device_say_the_same(slots: list[int]) -> None:
    batch = group_rows(slots, CPU)
    for groups in (batch.groups, batch.small, batch.large) if batch is not None else ():
        if groups is not None:
            assert groups.starts.tolist() == list(groups.host_starts)
            assert groups.slots.tolist() == list(groups.host_slots)
            assert {groups.order.dtype, groups.starts.dtype, groups.slots.dtype} == {torch.int32}
            assert groups.host_starts[0] == 0 and list(groups.host_starts) == sorted(groups.host_starts)


def test_a_batch_without_adapters_is_none() -> None:
    assert group_rows([], CPU) is None
    assert group_rows([-1] * 40, CPU) is None
