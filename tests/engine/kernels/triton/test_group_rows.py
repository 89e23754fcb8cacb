"""The chunk list made by the device against the definition. Interpreted in the process that `test_sgmv` starts."""

import os
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.batch.forward_batch import AdapterPath
from loraplex.engine.kernels import dispatch
from loraplex.engine.kernels.group_rows import group_on_device
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.lora.device_batch import (
    DECODE_ROWS,
    FEW_ADAPTERS,
    PREFILL_ROWS,
    DeviceLoraBatch,
    LoraPath,
    chunk_bound,
)
from loraplex.engine.runner.cuda_graphs.adapter_kinds import AdapterKind, AdapterKinds, StaticGroups

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(),
    reason="nothing here runs kernels",
)


def device() -> torch.device:
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


def members_of(rows: list[int], slot: int) -> list[int]:
    return [row for row, other in enumerate(rows) if other == slot]


@settings(max_examples=50)
@given(
    st.one_of(
        st.lists(st.integers(-1, 4), min_size=1, max_size=150),
        st.lists(st.integers(-1, 2000), min_size=1, max_size=70),
        st.lists(st.just(3), min_size=1, max_size=100),
    ),
    st.sampled_from([LoraPath.FOLDED, LoraPath.MIXED]),
    st.integers(0, 3),
)
def test_chunks_are_the_rows_of_each_slot_in_order(rows: list[int], path: LoraPath, spare: int) -> None:
    adapters = len(set(rows) - {-1}) + spare
    row_slots = torch.tensor(rows, dtype=torch.int32, device=device())
    batch = group_on_device(row_slots, path, adapters)
    most = {LoraPath.FOLDED: DECODE_ROWS, LoraPath.MIXED: PREFILL_ROWS}[path]
    order, starts, ends, slots = (each.tolist() for each in batch.chunk_lists)
    keys = sorted(set(rows) - {-1}) + [-1] * (-1 in rows)
    expected = [
        (slot, members[i : i + most])
        for slot in keys
        for members in (members_of(rows, slot),)
        for i in range(0, len(members), most)
    ]
    assert len(expected) <= batch.num_chunks == len(slots)
    found = [(slot, order[start:end]) for slot, start, end in zip(slots, starts, ends, strict=True)]
    assert found[: len(expected)] == expected
    assert found[len(expected) :] == [(-1, [])] * (batch.num_chunks - len(expected))
    assert all(
        end == start for (_, end), (start, _) in pairwise(zip(starts[: len(expected)], ends, strict=False))
    )


@given(st.lists(st.integers(-1, 9), min_size=1, max_size=300), st.sampled_from([1, 16, 32]))
def test_the_bound_holds_for_any_rows(rows: list[int], most: int) -> None:
    needed = sum(-(-rows.count(slot) // most) for slot in set(rows))
    assert needed <= chunk_bound(len(rows), len(set(rows) - {-1}), most)


def groups_of(batch: LoraBatch | None) -> list[tuple[int, list[int]]]:
    """(slot, rows) of every chunk with an adapter, in the order of its programs."""
    if batch is None:
        return []
    assert isinstance(batch, DeviceLoraBatch)
    if batch.chunks is None:
        return [(slot, [row]) for row, slot in enumerate(batch.row_slots.tolist()) if slot >= 0]
    order, starts, ends, slots = (each.tolist() for each in batch.chunk_lists)
    chunks = zip(slots, starts, ends, strict=True)
    return [(slot, order[start:end]) for slot, start, end in chunks if slot >= 0 and end > start]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], int, list[int]]:
    """Slots of the rows of a step, how many of them decode, and the rows that are sampled. Each chunk is of one adapter."""
    slots = st.integers(-1, draw(st.sampled_from([0, 5, 40])))
    decodes = draw(st.lists(slots, max_size=40))
    chunks = draw(st.lists(st.tuples(slots, st.integers(2, 40)), max_size=4))
    rows = decodes + [slot for slot, count in chunks for _ in range(count)]
    sampled = draw(st.lists(st.integers(0, max(0, len(rows) - 1)), max_size=12, unique=True))
    return rows, len(decodes), sorted(sampled) if rows else []


@settings(max_examples=60)
@given(steps(), st.booleans(), st.integers(0, 20))
def test_a_captured_step_groups_rows_as_an_eager_one(
    step: tuple[list[int], int, list[int]], deterministic: bool, padding: int
) -> None:
    rows, decodes, sampled = step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_cpu_backend", lambda: dispatch.KernelBackend.TRITON)
        adapters = len(set(rows) - {-1})
        kind = AdapterKinds(FEW_ADAPTERS, is_one=deterministic).of(adapters)
        path = AdapterPath(deterministic)
        eager = path.group(rows, device(), decodes)
        eager_sampled = path.group([rows[row] for row in sampled], device(), len(sampled), rows)
        if kind is AdapterKind.BASE:
            assert eager is None and eager_sampled is None
            return
        grouping = StaticGroups(path, max_adapters=41)
        padded = torch.tensor(rows + [-1] * padding, dtype=torch.int32, device=device())
        captured = grouping(padded, kind, decodes < len(rows))
        index = torch.tensor(sampled + [0] * padding, dtype=torch.int64, device=device())
        captured_sampled = grouping(padded.index_select(0, index), kind, False)
    assert isinstance(eager, DeviceLoraBatch) and isinstance(captured, DeviceLoraBatch)
    assert captured.path is eager.path and groups_of(captured) == groups_of(eager)
    if eager_sampled is not None:
        assert isinstance(eager_sampled, DeviceLoraBatch) and isinstance(captured_sampled, DeviceLoraBatch)
        assert captured_sampled.path is eager_sampled.path
    real = [
        (slot, [row for row in members if row < len(sampled)])
        for slot, members in groups_of(captured_sampled)
    ]
    assert sorted(row for _, members in real for row in members) == [
        place for place, row in enumerate(sampled) if rows[row] >= 0
    ]
    assert all(rows[sampled[row]] == slot for slot, members in real for row in members)
