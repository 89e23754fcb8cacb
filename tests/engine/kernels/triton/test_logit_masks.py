"""The Triton body of the bitmask: interpreted on the CPU (a process of its own: the switch is read at import), compiled
for sm_90 without a GPU, and on CUDA where there is one.
"""

import pytest
import torch
from tests.engine.interpreter_runs import INTERPRETING, InterpreterRuns

from loraplex.engine.kernels.reference import bitmask as reference

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 70, 2048, 4099, 49_152])
def test_equals_the_reference(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    from loraplex.engine.kernels.triton.logit_masks import apply_bitmask

    generator = torch.Generator().manual_seed(vocab)
    memory = torch.randn(6, vocab, generator=generator).to(device, dtype)
    rows = torch.tensor([4, 0, 3], device=device)
    words = (vocab + 31) // 32
    bitmask = torch.randint(-(2**31), 2**31, (3, words), generator=generator).to(torch.int32)
    bitmask[0, 0], bitmask[1, -1] = 0, -1
    wanted = memory.clone()
    reference.apply_bitmask(wanted[:5], rows, bitmask.to(device))
    apply_bitmask(memory[:5], rows, bitmask.to(device))
    assert torch.equal(memory, wanted)


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter's process")
@pytest.mark.interpreted(__file__, seconds=6)
def test_interpreted(interpreter_runs: InterpreterRuns, request: pytest.FixtureRequest) -> None:
    assert interpreter_runs.passed(request.node) == 10
