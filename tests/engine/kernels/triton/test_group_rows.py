"""The chunk list made by the device against the definition. Interpreted in the process that `test_sgmv` starts."""

import os
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.kernels import dispatch
from loraplex.engine.kernels.group_rows import every_path, group_on_device
from loraplex.engine.lora.device_batch import DECODE_ROWS, PREFILL_ROWS, chunk_bound

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
    st.booleans(),
    st.integers(0, 3),
)
def test_chunks_are_the_rows_of_each_slot_in_order(rows: list[int], is_decode: bool, spare: int) -> None:
    adapters = len(set(rows) - {-1}) + spare
    row_slots = torch.tensor(rows, dtype=torch.int32, device=device())
    batch = group_on_device(row_slots, adapters, is_decode=is_decode)
    most = DECODE_ROWS if is_decode else PREFILL_ROWS
    assert batch.chunk_rows == most
    order, slots = batch.chunks.order.tolist(), batch.chunks.slots.tolist()
    starts, ends = batch.chunks.starts.tolist(), batch.chunks.ends.tolist()
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


def test_every_path_is_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_cpu_backend", lambda: dispatch.KernelBackend.TRITON)
    paths = every_path(device())
    kinds = [(path.is_folded, path.by_row, path.chunk_rows) for path in paths]
    assert kinds == [(True, False, DECODE_ROWS), (False, True, DECODE_ROWS), (False, False, PREFILL_ROWS)]
    assert all(path.is_static and path.chunks.slots.tolist() == [0] for path in paths)
    (path,) = every_path(device(), deterministic=True)
    assert (path.is_folded, path.by_row, path.chunk_rows) == (False, False, DECODE_ROWS)
