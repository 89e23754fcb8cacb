"""The Triton kernels of adapters: interpreted on the CPU (a process of its own: the switch is read at import), and on CUDA
where there is one. `test_compile_rung` compiles them.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.interpreter_runs import INTERPRETING, InterpreterRuns
from tests.engine.lora.installed_slices import remove

from loraplex.engine.kernels import dispatch
from loraplex.engine.kernels.group_rows import group_on_device, group_rows
from loraplex.engine.kernels.sgmv import sgmv
from loraplex.engine.layers.embedding import Embedding
from loraplex.engine.layers.lora_linear import LoraLinear
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.lora.device_batch import ChunkBuffers, DeviceLoraBatch, LoraPath, make_workspace

pytest.importorskip("triton")

INTERPRETED = tuple(
    str(Path(__file__).with_name(name))
    for name in ("test_sgmv.py", "test_group_rows.py", "test_folded_expand.py")
)
QUANTIZED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@pytest.fixture
def device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Use the Triton backend for the CPU's tensors."""
    monkeypatch.setattr(dispatch, "_cpu_backend", lambda: dispatch.KernelBackend.TRITON)
    return device


@pytest.fixture(params=[LoraPath.FOLDED, LoraPath.BY_ROW, LoraPath.MIXED], ids=["tile", "row", "prefill"])
def grouped(
    request: pytest.FixtureRequest, shape: Any, device: torch.device
) -> Callable[[Any], DeviceLoraBatch]:
    """A problem's rows, grouped for one of the paths."""
    path = request.param
    if device.type == "cpu" and (len(shape.rows) > 16) is not (path is LoraPath.MIXED):
        pytest.skip("chunks of 32 rows are for many rows, and rows one by one for few")

    def group(problem: Any) -> DeviceLoraBatch:
        row_slots = torch.tensor(problem.shape.rows, dtype=torch.int32, device=device)
        return group_on_device(row_slots, path, len(set(problem.shape.rows) - {-1}))

    return group


def run(problem: Any, batch: LoraBatch | None) -> torch.Tensor:
    result: torch.Tensor = problem.y.clone()
    if batch is not None:
        sgmv(problem.x, result, problem.site, batch)
    return result


def fill_chunks(row_slots: torch.Tensor, chunk_rows: int, chunks: ChunkBuffers) -> None:
    from loraplex.engine.kernels.triton import group_rows

    group_rows.group_rows(row_slots, chunk_rows, chunks)


def as_bits(row: torch.Tensor) -> torch.Tensor:
    return row.view(torch.int16)


def test_equals_a_loop_over_rows(
    problem_of: Any, shape: Any, kernel_dtype: torch.dtype, device: torch.device, grouped: Any
) -> None:
    problem = problem_of(shape, kernel_dtype, device).scatter()
    batch = grouped(problem)
    if device.type == "cpu" and batch.path is LoraPath.BY_ROW and kernel_dtype is torch.float32:
        pytest.skip("its spans are twice as many as those of shorter types")
    problem.check(run(problem, batch))


@pytest.mark.parametrize("pages", QUANTIZED.values(), ids=QUANTIZED)
def test_quantized_pages_equal_a_loop_over_rows(
    problem_of: Any, shape: Any, device: torch.device, grouped: Any, pages: torch.dtype
) -> None:
    if device.type == "cpu" and (len(shape.rows) > 8 or shape.inputs > 64):
        pytest.skip("nothing new about pages")
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    problem = problem_of(shape, dtype, device, page_dtype=pages).scatter()
    problem.check(run(problem, grouped(problem)))


@pytest.mark.parametrize("pages", QUANTIZED.values(), ids=QUANTIZED)
def test_small_deltas_of_8_bits_keep_their_digits_in_float16(
    problem_of: Any, shape: Any, device: torch.device, grouped: Any, pages: torch.dtype
) -> None:
    """Their hidden values are some hundred times smaller than they are, and float16 has few digits left below 6e-5."""
    if len(shape.rows) > 8 or shape.inputs != 64:
        pytest.skip("nothing new")
    problem = problem_of(shape, torch.float16, device, page_dtype=pages)
    for parts in problem.site.slots.values():
        for part in parts:
            part.scales.mul_(1e-3)
    problem.y.zero_()
    touched, expected = problem.touched(), problem.expected()
    error = run(problem, grouped(problem)).double()[touched] - expected[touched]
    assert error.norm() < 1e-3 * expected[touched].norm()


def test_row_is_bitwise_the_same_in_any_batch(
    problem_of: Any, shape: Any, kernel_dtype: torch.dtype, device: torch.device
) -> None:
    """In deterministic mode: alone, with others, as a part of a prompt, and wherever its pages lie."""
    if device.type == "cpu" and (kernel_dtype is torch.float32 or shape.inputs > 100):
        pytest.skip("a shorter type tells as much")
    problem = problem_of(shape, kernel_dtype, device)
    together = run(problem, group_rows(shape.rows, device, deterministic=True))
    as_prompt = run(problem.scatter(), group_rows(shape.rows, device, 0, deterministic=True))
    assert torch.equal(as_bits(together), as_bits(as_prompt))
    adapted = [row for row, slot in enumerate(shape.rows) if slot >= 0]
    for row in adapted[:: max(1, len(adapted) // 2)]:
        only = [slot if i == row else -1 for i, slot in enumerate(shape.rows)]
        alone = run(problem, group_rows(only, device, deterministic=True))
        assert torch.equal(as_bits(alone[row]), as_bits(together[row])), f"row {row}"


def test_nan_stays_in_its_row(problem_of: Any, shape: Any, device: torch.device, grouped: Any) -> None:
    if shape.inputs != 37:
        pytest.skip("one shape with several adapters tells all")
    problem = problem_of(shape, torch.float32, device)
    batch = grouped(problem)
    clean = run(problem, batch)
    row = next(i for i, slot in enumerate(shape.rows) if any(shape.ranks.get(slot, ())))
    problem.x[row, shape.inputs // 2] = torch.nan
    result = run(problem, batch)
    others = [i for i in range(len(shape.rows)) if i != row]
    assert torch.equal(result[others].view(torch.int32), clean[others].view(torch.int32))
    assert result[row, problem.touched()[row]].isnan().all()


def test_removed_adapters_have_no_effect(
    problem_of: Any, shape: Any, device: torch.device, grouped: Any
) -> None:
    if len(shape.rows) > 8 or shape.inputs > 64:
        pytest.skip("nothing new")
    problem = problem_of(shape, torch.float32, device)
    for slot in shape.ranks:
        remove(problem.site, slot)
    problem.check(run(problem, grouped(problem)))


@pytest.mark.parametrize("adapters", [8, 40])
def test_one_set_of_buffers_serves_any_rows(
    problem_of: Any, shape: Any, device: torch.device, adapters: int
) -> None:
    """As a captured step does: the grid and every address stay, the slots change."""
    if shape.inputs != 37:
        pytest.skip("one shape with several adapters tells all")
    problem = problem_of(shape, torch.float32, device)
    if len(set(shape.rows)) > adapters:
        pytest.skip("more adapters than the step was captured for")
    static = torch.full((len(shape.rows),), max(shape.ranks), dtype=torch.int32, device=device)
    workspace = make_workspace([problem.site], len(shape.rows), device)
    path = LoraPath.of(adapters, is_mixed=False, deterministic=False)
    batch = group_on_device(static, path, adapters, is_static=True, workspace=workspace)
    assert batch.path is (LoraPath.FOLDED if adapters == 8 else LoraPath.BY_ROW)
    assert batch.acts_at(problem.site)
    for rows in (shape.rows[::-1], (-1,) * len(shape.rows), shape.rows):
        static.copy_(torch.tensor(rows, dtype=torch.int32))
        if batch.chunks is not None:
            fill_chunks(static, path.chunk_rows, batch.chunks)
        workspace.hidden.fill_(torch.nan)
        result = run(problem, batch)
        if rows == shape.rows:
            problem.check(result)
        elif set(rows) == {-1}:
            assert torch.equal(result.view(torch.int32), problem.y.view(torch.int32))


def test_rows_of_one_adapter_do_not_wait_for_one_another(
    problem_of: Any, shape_of: Any, device: torch.device
) -> None:
    """In steps of many adapters each row has programs of its own, so that a much used adapter costs no more than another.
    Its results have the bits that they have alone.
    """
    rows = (3, 0, 0, -1, 0, 0, 1, 0)
    problem = problem_of(
        shape_of(37, (20, 9), {0: (8, 17), 1: (0, 3), 3: (5, 5)}, rows), torch.float16, device
    )
    row_slots = torch.tensor(rows, dtype=torch.int32, device=device)
    batch = group_on_device(row_slots, LoraPath.BY_ROW, 3)
    assert (batch.chunks, batch.num_chunks) == (None, len(rows))
    together = run(problem, batch)
    problem.check(together)
    for row, slot in enumerate(rows):
        only = torch.full_like(row_slots, -1)
        only[row] = slot
        alone = run(problem, group_on_device(only, LoraPath.BY_ROW, 1))
        assert torch.equal(as_bits(alone[row]), as_bits(together[row])), f"row {row}"


class RecordingBranch:
    """Notes the order in which work is sent."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextmanager
    def fork(self) -> Iterator[None]:
        self.events.append("fork")
        yield
        self.events.append("forked")

    def join(self) -> None:
        self.events.append("join")


def test_shrink_runs_beside_the_base_product(problem_of: Any, shape: Any, device: torch.device) -> None:
    if shape.inputs > 64 or len(shape.rows) > 8:
        pytest.skip("nothing new")
    problem = problem_of(shape, torch.float32, device)
    workspace = make_workspace([problem.site], len(shape.rows), device)
    branch = RecordingBranch()

    def base(x: torch.Tensor) -> torch.Tensor:
        assert x is problem.x
        branch.events.append("base")
        result: torch.Tensor = problem.y.clone()
        return result

    batch = group_rows(shape.rows, device, workspace=replace(workspace, branch=branch))
    problem.check(LoraLinear(base, problem.site)(problem.x, batch))  # type: ignore[arg-type]
    assert branch.events == ["fork", "forked", "base", "join"]
    branch.events.clear()
    problem.site.slots.clear()
    LoraLinear(base, problem.site)(problem.x, batch)  # type: ignore[arg-type]
    assert branch.events == ["base"]


@pytest.mark.parametrize("pages", [None, *QUANTIZED.values()], ids=["model", *QUANTIZED])
def test_embedding_adds_the_column_of_the_token(
    problem_of: Any, shape: Any, device: torch.device, pages: torch.dtype | None
) -> None:
    if len(shape.sizes) > 1:
        pytest.skip("an embedding has one slice")
    dtype = torch.float32 if pages is None or device.type == "cpu" else torch.bfloat16
    problem = problem_of(shape, dtype, device, page_dtype=pages).scatter()
    weight = torch.randn(shape.inputs, shape.sizes[0]).to(device, dtype)
    tokens = torch.arange(len(shape.rows), device=device) * 7 % shape.inputs
    one_hot = torch.zeros(len(shape.rows), shape.inputs, dtype=dtype, device=device)
    problem.x = one_hot.scatter_(1, tokens[:, None], 1.0)
    problem.y = weight[tokens]
    result = Embedding(weight, problem.site)(tokens, group_rows(shape.rows, device))
    problem.check(result)


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter's process")
@pytest.mark.interpreted(*INTERPRETED, seconds=35)
def test_interpreted(interpreter_runs: InterpreterRuns, request: pytest.FixtureRequest) -> None:
    assert interpreter_runs.passed(request.node) >= 90


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter's process")
def test_the_engine_loads_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import loraplex.engine.engine, loraplex.engine.kernels.sgmv"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env=os.environ | {"PYTHONPATH": ".src"},
        cwd=Path(__file__).parents[4],
        timeout=120,
    )
