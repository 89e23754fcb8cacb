"""`group_rows`: the rows of a step by adapter slot, for any step."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.lora.batch import GROUP_ROWS, LoraGroups, group_rows

CPU = torch.device("cpu")

row_slots = st.lists(st.integers(-1, 6), max_size=80)


def members(groups: LoraGroups | None) -> dict[int, list[int]]:
    """Rows by slot, read from the tensors as a kernel reads them."""
    if groups is None:
        return {}
    starts = groups.starts.tolist()
    rows: dict[int, list[int]] = {}
    for g, slot in enumerate(groups.slots.tolist()):
        rows.setdefault(slot, []).extend(groups.order[starts[g] : starts[g + 1]].tolist())
    return rows


@given(row_slots)
def test_every_adapted_row_stands_in_its_group_and_no_other_does(slots: list[int]) -> None:
    batch = group_rows(slots, CPU)
    expected = {slot: [r for r, s in enumerate(slots) if s == slot] for slot in set(slots) - {-1}}
    assert (batch is None) == (not expected)
    if batch is not None:
        assert members(batch.groups) == expected
        assert batch.groups.num_rows == sum(slot >= 0 for slot in slots)


@given(row_slots, st.integers(0, 60))
def test_a_rows_side_depends_on_what_it_is_alone(slots: list[int], split: int) -> None:
    num_decodes = min(split, len(slots))
    batch = group_rows(slots, CPU, num_decodes)
    if batch is None:
        return
    decodes = sorted(row for rows in members(batch.decodes).values() for row in rows)
    chunks = sorted(row for rows in members(batch.chunks).values() for row in rows)
    adapted = [row for row, slot in enumerate(slots) if slot >= 0]
    assert decodes == [row for row in adapted if row < num_decodes]
    assert chunks == [row for row in adapted if row >= num_decodes]
    assert (batch.decodes is None) == (not decodes) and (batch.chunks is None) == (not chunks)


@given(row_slots)
def test_decode_groups_are_bounded(slots: list[int]) -> None:
    batch = group_rows(slots, CPU)
    starts = batch.decodes.host_starts if batch is not None and batch.decodes is not None else (0,)
    assert all(0 < end - start <= GROUP_ROWS for start, end in pairwise(starts))


@given(row_slots)
def test_host_and_device_say_the_same(slots: list[int]) -> None:
    batch = group_rows(slots, CPU)
    for groups in (batch.groups, batch.decodes, batch.chunks) if batch is not None else ():
        if groups is not None:
            assert groups.starts.tolist() == list(groups.host_starts)
            assert groups.slots.tolist() == list(groups.host_slots)
            assert {groups.order.dtype, groups.starts.dtype, groups.slots.dtype} == {torch.int32}
            assert groups.host_starts[0] == 0 and list(groups.host_starts) == sorted(groups.host_starts)


def test_a_batch_without_adapters_is_none() -> None:
    assert group_rows([], CPU) is None
    assert group_rows([-1] * 40, CPU) is None
