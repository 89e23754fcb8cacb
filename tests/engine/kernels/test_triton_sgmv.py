"""The Triton body of SGMV: interpreted on the CPU (a process of its own: the switch is read at import), compiled for
sm_90 without a GPU, and on CUDA where there is one.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine.lora.batch import LoraGroups, group_rows

pytest.importorskip("triton")

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
MAX_SHARED_BYTES = 227 << 10
"""What one block may have on sm_90."""


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where this process can run kernels, with memory that nobody has written full of NaN."""
    if (request.param == "interpreter") is not INTERPRETING:
        pytest.skip("the interpreter has a process of its own")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield torch.device("cpu" if request.param == "interpreter" else "cuda")
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def kernel_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    if dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter's bfloat16 arithmetic is wrong")
    return dtype


def run(problem: Any, groups: LoraGroups) -> torch.Tensor:
    from loraplex.engine.kernels.triton_sgmv import sgmv

    result: torch.Tensor = problem.y.clone()
    sgmv(problem.x, result, problem.site, groups)
    return result


def test_equals_a_loop_over_rows(
    problem_of: Any, shape: Any, kernel_dtype: torch.dtype, device: torch.device
) -> None:
    problem = problem_of(shape, kernel_dtype, device)
    problem.check(run(problem, problem.batch.groups))


def test_row_is_bitwise_the_same_alone(
    problem_of: Any, shape: Any, kernel_dtype: torch.dtype, device: torch.device
) -> None:
    problem = problem_of(shape, kernel_dtype, device)
    together = run(problem, problem.batch.groups)
    for row in range(0, len(shape.rows), 7):
        batch = group_rows([slot if i == row else -1 for i, slot in enumerate(shape.rows)], device)
        if batch is not None:
            alone = run(problem, batch.groups)
            assert torch.equal(alone[row].view(torch.int16), together[row].view(torch.int16)), f"row {row}"


def test_nan_stays_in_its_row(problem_of: Any, shape: Any, device: torch.device) -> None:
    problem = problem_of(shape, torch.float32, device)
    clean = run(problem, problem.batch.groups)
    row = next(i for i, slot in enumerate(shape.rows) if any(shape.ranks.get(slot, ())))
    problem.x[row, shape.inputs // 2] = torch.nan
    result = run(problem, problem.batch.groups)
    others = [i for i in range(len(shape.rows)) if i != row]
    assert torch.equal(result[others].view(torch.int32), clean[others].view(torch.int32))
    assert result[row, problem.touched()[row]].isnan().all()


def test_empty_groups_and_removed_adapters_have_no_effect(
    problem_of: Any, shape: Any, device: torch.device
) -> None:
    problem = problem_of(shape, torch.float32, device)
    groups = problem.batch.groups
    doubled = LoraGroups(
        order=groups.order,
        starts=groups.starts.repeat_interleave(2)[1:],
        slots=groups.slots.repeat_interleave(2),
        host_starts=tuple(start for start in groups.host_starts for _ in range(2))[1:],
        host_slots=tuple(slot for slot in groups.host_slots for _ in range(2)),
    )
    problem.check(run(problem, doubled))
    for slot in shape.ranks:
        problem.site.remove(slot)
    problem.check(run(problem, groups))


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter's process")
def test_interpreted() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", __file__]
    done = subprocess.run(
        command,
        check=False,
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 48


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter's process")
def test_the_engine_loads_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import loraplex.engine.engine, loraplex.engine.kernels.sgmv"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env=os.environ | {"PYTHONPATH": ".src"},
        cwd=Path(__file__).parents[3],
        timeout=120,
    )


COMPILE = """
import subprocess, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from loraplex.engine.kernels import triton_sgmv as module

INTEGERS = ("num_rows", "inputs", "outputs", "slices", "pages", "hidden_ranks", "splits")
POINTERS = {"table": "*i64", "offsets": "*i64", "order": "*i32", "starts": "*i32", "slots": "*i32", "hidden": "*fp32"}

def compiled(kernel, dtype, aligned):
    constants = dict(
        aligned=aligned, split_k=module.SPLIT_K, block_m=module.BLOCK_M, block_r=module.BLOCK_R,
        block_k=module.BLOCK_K, block_n=module.BLOCK_N,
    )
    signature = {
        name: "constexpr" if name in constants else "i32" if name in INTEGERS else POINTERS.get(name, "*" + dtype)
        for name in kernel.arg_names
    }
    multiples = ("inputs", "outputs", "hidden_ranks") if aligned else ("hidden_ranks",)
    hinted = [i for i, (n, kind) in enumerate(signature.items()) if kind.startswith("*") or n in multiples]
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(i,): constants[n] for i, n in enumerate(kernel.arg_names) if n in constants},
        attrs={(i,): [["tt.divisibility", 16]] for i in hinted},
    )
    options = {"num_warps": module.NUM_WARPS, "num_stages": module.NUM_STAGES, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

tool = triton.knobs.nvidia.cuobjdump.path
for dtype in ("bf16", "fp16", "fp32"):
    for aligned in (True, False):
        for kernel in (module.shrink_kernel, module.expand_kernel):
            binary = compiled(kernel, dtype, aligned)
            with open(sys.argv[1], "wb") as file:
                file.write(binary.asm["cubin"])
            usage = subprocess.run([tool, "-res-usage", sys.argv[1]], capture_output=True, text=True, check=True)
            resources = next(line for line in usage.stdout.splitlines() if "STACK:" in line)
            ptx = binary.asm["ptx"]
            wide = "cp.async.cg" in ptx or "ld.global.v4" in ptx
            print(kernel.__name__, dtype, aligned, binary.metadata.shared, wide, "mma.sync" in ptx, resources)
"""


@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
def test_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ".src"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(tmp_path / "kernel.cubin")],
        check=False,
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    variants = done.stdout.splitlines()
    assert len(variants) == 12
    for variant in variants:
        _, dtype, aligned, shared, wide, tensor_cores = variant.split()[:6]
        assert int(shared) <= MAX_SHARED_BYTES
        assert re.search(r"\bSTACK:0\b", variant) and re.search(r"\bLOCAL:0\b", variant), variant
        assert aligned == "False" or wide == "True", f"loads are not vectorised: {variant}"
        assert dtype == "fp32" or tensor_cores == "True", variant
