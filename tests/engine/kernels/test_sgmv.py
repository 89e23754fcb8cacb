"""SGMV: the torch backend against a loop over rows, the compiled one against the same loop, and each row against itself
alone.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.lora.installed_slices import remove

from loraplex.engine.kernels import dispatch
from loraplex.engine.kernels.cpu import sgmv as compiled
from loraplex.engine.kernels.reference import sgmv as reference
from loraplex.engine.kernels.sgmv import sgmv
from loraplex.engine.lora.batch import LoraGroups, group_rows
from loraplex.engine.lora.site import make_site

CPU = torch.device("cpu")


def without_effect(body: Any, problem: Any) -> bool:
    """Whether groups of no rows leave everything as it was."""
    slots = tuple(problem.shape.ranks)
    groups = LoraGroups(
        order=torch.zeros(1, dtype=torch.int32),
        starts=torch.zeros(len(slots) + 1, dtype=torch.int32),
        slots=torch.tensor(slots, dtype=torch.int32),
        host_starts=(0,) * (len(slots) + 1),
        host_slots=slots,
    )
    result = problem.y.clone()
    body(problem.x, result, problem.site, groups)
    return torch.equal(result.view(torch.int16), problem.y.view(torch.int16))


def test_reference_equals_a_loop_over_rows(problem_of: Any, shape: Any, dtype: torch.dtype) -> None:
    problem = problem_of(shape, dtype, CPU)
    result = problem.y.clone()
    reference.sgmv(problem.x, result, problem.site, problem.batch.groups)
    problem.check(result)


@pytest.mark.usefixtures("threads")
def test_compiled_equals_a_loop_over_rows(problem_of: Any, shape: Any, dtype: torch.dtype) -> None:
    problem = problem_of(shape, dtype, CPU)
    result = problem.y.clone()
    sgmv(problem.x, result, problem.site, problem.batch)
    problem.check(result)


def test_reference_is_the_choice_of_a_cpu_without_compiled_kernels(
    problem_of: Any, shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_cpu_backend", lambda: dispatch.KernelBackend.REFERENCE)
    problem = problem_of(shape, torch.float32, CPU)
    result = problem.y.clone()
    sgmv(problem.x, result, problem.site, problem.batch)
    problem.check(result)


@pytest.mark.usefixtures("threads")
def test_empty_groups_have_no_effect(problem_of: Any, shape: Any) -> None:
    problem = problem_of(shape, torch.float32, CPU)
    assert without_effect(reference.sgmv, problem)
    assert without_effect(compiled.sgmv, problem)


@pytest.mark.usefixtures("threads")
def test_a_removed_adapter_has_no_effect(problem_of: Any, shape: Any, dtype: torch.dtype) -> None:
    problem = problem_of(shape, dtype, CPU)
    for slot in shape.ranks:
        remove(problem.site, slot)
    result = problem.y.clone()
    sgmv(problem.x, result, problem.site, problem.batch)
    problem.check(result)


@pytest.mark.usefixtures("threads")
def test_compiled_row_is_bitwise_the_same_alone(problem_of: Any, shape: Any, dtype: torch.dtype) -> None:
    problem = problem_of(shape, dtype, CPU)
    together = problem.y.clone()
    sgmv(problem.x, together, problem.site, problem.batch)
    for row, slot in enumerate(shape.rows):
        alone = problem.y[row : row + 1].clone()
        batch = group_rows([slot], CPU)
        if batch is not None:
            sgmv(problem.x[row : row + 1], alone, problem.site, batch)
        assert torch.equal(alone[0].view(torch.int16), together[row].view(torch.int16)), f"row {row}"


@pytest.mark.usefixtures("threads")
def test_slots_may_be_permuted(problem_of: Any, shape: Any, dtype: torch.dtype) -> None:
    last = max([*shape.ranks, *shape.rows])
    permuted = replace(
        shape,
        ranks={last - slot: ranks for slot, ranks in shape.ranks.items()},
        rows=tuple(slot if slot < 0 else last - slot for slot in shape.rows),
    )
    problem, other = problem_of(shape, dtype, CPU), problem_of(permuted, dtype, CPU)
    first, second = problem.y.clone(), other.y.clone()
    sgmv(problem.x, first, problem.site, problem.batch)
    sgmv(other.x, second, other.site, other.batch)
    assert torch.equal(first.view(torch.int16), second.view(torch.int16))


@pytest.mark.usefixtures("threads")
def test_nan_stays_in_its_row(problem_of: Any, shape: Any, dtype: torch.dtype) -> None:
    problem = problem_of(shape, dtype, CPU)
    clean, result = problem.y.clone(), problem.y.clone()
    sgmv(problem.x, clean, problem.site, problem.batch)
    row = next(i for i, slot in enumerate(shape.rows) if any(shape.ranks.get(slot, ())))
    problem.x[row, shape.inputs // 2] = torch.nan
    sgmv(problem.x, result, problem.site, problem.batch)
    others = [i for i in range(len(shape.rows)) if i != row]
    assert torch.equal(result[others].view(torch.int16), clean[others].view(torch.int16))
    assert result[row, problem.touched()[row]].isnan().all()


def test_buffers_outlive_their_growth_by_another_engine() -> None:
    site = make_site(("layers.0.o_proj",), 8, (5,), 1, CPU)
    workspace = compiled.Workspace()
    small, large = workspace.reserve(1, site, 1), workspace.reserve(100, site, 8)
    assert {t.data_ptr() for t in small}.isdisjoint(t.data_ptr() for t in large)
    assert [t.numel() for t in workspace.reserve(1, site, 1)] == [t.numel() for t in large]
