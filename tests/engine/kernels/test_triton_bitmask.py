"""The Triton body of the bitmask: interpreted on the CPU (a process of its own: the switch is read at import), compiled
for sm_90 without a GPU, and on CUDA where there is one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.engine.interpreter_runs import INTERPRETING, InterpreterRuns

from loraplex.engine.kernels.reference import bitmask as reference

pytest.importorskip("triton")


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where this process can run kernels."""
    if (request.param == "interpreter") is not INTERPRETING:
        pytest.skip("the interpreter has a process of its own")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cpu" if request.param == "interpreter" else "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 70, 2048, 4099, 49_152])
def test_equals_the_reference(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    from loraplex.engine.kernels.triton_bitmask import apply_bitmask

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


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from loraplex.engine.kernels import triton_bitmask as module

for dtype in ("bf16", "fp16", "fp32"):
    signature = {
        "logits": "*" + dtype, "rows": "*i64", "bitmask": "*i32", "vocab": "i32", "words": "i32",
        "block_words": "constexpr",
    }
    source = ASTSource(
        module.bitmask_kernel,
        signature=signature,
        constexprs={(5,): module.BLOCK_WORDS},
        attrs={(i,): [["tt.divisibility", 16]] for i in (0, 1, 2)},
    )
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": module.NUM_WARPS})
    print(dtype, binary.metadata.shared, "st.global" in binary.asm["ptx"])
"""


@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
def test_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        check=False,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ".src"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    variants = [line.split() for line in done.stdout.splitlines()]
    assert [dtype for dtype, _, _ in variants] == ["bf16", "fp16", "fp32"]
    assert all(int(shared) <= 8192 and stores == "True" for _, shared, stores in variants)
