"""The arena's pages read by the Triton kernels through the tables, interpreted in a process of its own."""

import pytest
import torch
from tests.engine.interpreter_runs import INTERPRETING, InterpreterRuns
from tests.engine.lora.memory.test_device_memory import CPU, DOWN, QKV, adapter, install, memory, sites

from loraplex.engine.kernels import dispatch
from loraplex.engine.kernels.group_rows import group_on_device
from loraplex.engine.kernels.reference import sgmv as reference
from loraplex.engine.kernels.sgmv import sgmv
from loraplex.engine.lora.batch import HostLoraBatch, group_rows
from loraplex.engine.lora.device_batch import LoraPath
from loraplex.engine.lora.memory.page_format import PageFormat
from loraplex.engine.lora.weights import LoraModule, LoraWeights

pytest.importorskip("triton")


@pytest.mark.skipif(not INTERPRETING, reason="the interpreter has a process of its own")
@pytest.mark.parametrize("page_dtype", [None, torch.int8], ids=["fp16", "int8"])
def test_kernels_find_every_page_by_the_table(
    page_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = sites()
    pool = memory(places, PageFormat(torch.float16, page_dtype), 1 << 19)
    ranks = [{QKV[0]: 40, QKV[1]: 8, QKV[2]: 3}, {DOWN[0]: 64}, {QKV[0]: 17}]
    placements = []
    for slot, modules in enumerate(ranks):
        weights = adapter(str(slot), modules, seed=slot)
        halves = {name: LoraModule(m.a.half(), m.b.half()) for name, m in weights.modules.items()}
        placements.append(install(pool, slot, LoraWeights(weights.digest, halves)))
        if slot == 1:
            pool.remove(placements[1])  # its pages are taken by the next one, among those of the first

    rows = [0, -1, 2, 0, 1]
    x = torch.randn(5, 64).half()
    expected = torch.zeros(5, 160).half()
    batch = group_rows(rows, CPU)
    assert isinstance(batch, HostLoraBatch)
    reference.sgmv(x, expected, places[0], batch.groups)
    monkeypatch.setattr(dispatch, "_cpu_backend", lambda: dispatch.KernelBackend.TRITON)
    row_slots = torch.tensor(rows, dtype=torch.int32)
    for path in (LoraPath.FOLDED, LoraPath.BY_ROW):
        y = torch.zeros(5, 160).half()
        sgmv(x, y, places[0], group_on_device(row_slots, path, 2))
        torch.testing.assert_close(y, expected, rtol=5e-3, atol=2e-2)
        assert not y[1].any() and not y[4].any() and y[2].any()


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter's process")
@pytest.mark.interpreted(__file__, seconds=2)
def test_interpreted(interpreter_runs: InterpreterRuns, request: pytest.FixtureRequest) -> None:
    assert interpreter_runs.passed(request.node) == 2
