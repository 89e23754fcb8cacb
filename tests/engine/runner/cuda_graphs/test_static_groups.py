"""How a captured step calls the kernels that group its rows; the kernels have their own tests."""

from typing import Any

import pytest
import torch

from loraplex.engine.batch.forward_batch import AdapterPath
from loraplex.engine.lora.device_batch import FEW_ADAPTERS
from loraplex.engine.runner.cuda_graphs import static_groups
from loraplex.engine.runner.cuda_graphs.adapter_kinds import AdapterKind
from loraplex.engine.runner.cuda_graphs.static_groups import StaticGroups

CPU = torch.device("cpu")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every grouping."""
    calls: list[dict[str, Any]] = []

    def group(row_slots: torch.Tensor, adapters: int, **options: Any) -> None:
        calls.append({"rows": row_slots.shape[0], "adapters": adapters} | options)

    monkeypatch.setattr(static_groups, "group_on_device", group)
    return calls


@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_are_those_of_the_kind_whatever_the_slots(
    asked: list[dict[str, Any]], deterministic: bool
) -> None:
    groups = StaticGroups(AdapterPath(deterministic), CPU)
    slots = torch.full((64,), -1, dtype=torch.int32)
    for kind in (AdapterKind.FEW, AdapterKind.MANY, AdapterKind.FEW):
        groups(slots, kind)
    groups(slots[:4], AdapterKind.FEW)
    assert [(call["rows"], call["adapters"]) for call in asked] == [
        (64, FEW_ADAPTERS),
        (64, 64),
        (64, FEW_ADAPTERS),
        (4, 4),
    ]
    assert all(call["is_static"] and call["is_decode"] for call in asked)
    assert {call["deterministic"] for call in asked} == {deterministic}
    assert asked[0]["buffers"] is asked[2]["buffers"] is not asked[1]["buffers"]
