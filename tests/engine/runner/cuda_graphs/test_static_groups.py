"""How a captured step calls the kernels that group its rows; the kernels have their own tests."""

from typing import Any

import pytest
import torch

from loraplex.engine.batch.forward_batch import AdapterPath
from loraplex.engine.lora.device_batch import FEW_ADAPTERS, LoraPath
from loraplex.engine.runner.cuda_graphs import adapter_kinds
from loraplex.engine.runner.cuda_graphs.adapter_kinds import AdapterKind, StaticGroups

Call = tuple[LoraPath, int]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The path and the most adapters of every grouping."""
    found: list[Call] = []

    def group(row_slots: torch.Tensor, path: LoraPath, adapters: int, *, is_static: bool, **_: Any) -> None:
        assert is_static
        found.append((path, adapters))

    monkeypatch.setattr(adapter_kinds, "group_on_device", group)
    return found


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [4, 64])
def test_kernels_are_those_of_the_kind_whatever_the_slots(
    calls: list[Call], deterministic: bool, rows: int
) -> None:
    """Also for the few sampled rows of a step with many adapters."""
    groups = StaticGroups(AdapterPath(deterministic), max_adapters=40)
    slots = torch.full((rows,), -1, dtype=torch.int32)
    for kind in (AdapterKind.FEW, AdapterKind.MANY):
        for is_mixed in (False, True):
            groups(slots, kind, is_mixed)
    assert [adapters for _, adapters in calls] == [FEW_ADAPTERS, FEW_ADAPTERS, 40, 40]
    paths = [LoraPath.FOLDED, LoraPath.MIXED, LoraPath.BY_ROW, LoraPath.MIXED]
    assert [path for path, _ in calls] == ([LoraPath.DETERMINISTIC] * 4 if deterministic else paths)


def test_a_step_of_many_adapters_is_one_where_few_may_run(calls: list[Call]) -> None:
    StaticGroups(AdapterPath(), max_adapters=2)(torch.zeros(4, dtype=torch.int32), AdapterKind.MANY, False)
    assert calls == [(LoraPath.BY_ROW, FEW_ADAPTERS + 1)]
