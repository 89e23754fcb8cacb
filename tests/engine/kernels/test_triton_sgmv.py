"""The Triton kernels of adapters: interpreted on the CPU (a process of its own: the switch is read at import), compiled
for sm_90 without a GPU, and on CUDA where there is one.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine.kernels import bodies
from loraplex.engine.kernels.group_rows import group_on_device, group_rows
from loraplex.engine.kernels.sgmv import sgmv
from loraplex.engine.layers.embedding import Embedding
from loraplex.engine.layers.lora_linear import LoraLinear
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.lora.device_batch import DeviceLoraBatch, make_workspace

pytest.importorskip("triton")

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
MAX_SHARED_BYTES = 227 << 10
"""What one block may have on sm_90."""
QUANTIZED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Where this process can run kernels, with memory that nobody has written full of NaN."""
    if (request.param == "interpreter") is not INTERPRETING:
        pytest.skip("the interpreter has a process of its own")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setattr(bodies, "_cpu_body", lambda: bodies.Body.TRITON)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield torch.device("cpu" if request.param == "interpreter" else "cuda")
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def kernel_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    if dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter's bfloat16 arithmetic is wrong")
    return dtype


@pytest.fixture(params=["tile", "row", "prefill"])
def grouped(
    request: pytest.FixtureRequest, shape: Any, device: torch.device
) -> Callable[[Any], DeviceLoraBatch]:
    """A problem's rows, grouped for one of the paths."""
    path = request.param
    is_long = len(shape.rows) > 16
    if device.type == "cpu" and is_long is not (path == "prefill") and (is_long or path == "prefill"):
        pytest.skip("chunks of 32 rows are for many rows, and rows one by one for few")

    def group(problem: Any) -> DeviceLoraBatch:
        batch = group_rows(problem.shape.rows, device, 0 if path == "prefill" else None)
        assert isinstance(batch, DeviceLoraBatch)
        return replace(batch, by_row=path == "row")

    return group


def run(problem: Any, batch: LoraBatch | None) -> torch.Tensor:
    result: torch.Tensor = problem.y.clone()
    if batch is not None:
        sgmv(problem.x, result, problem.site, batch)
    return result


def as_bits(row: torch.Tensor) -> torch.Tensor:
    return row.view(torch.int16)


def test_equals_a_loop_over_rows(
    problem_of: Any, shape: Any, kernel_dtype: torch.dtype, device: torch.device, grouped: Any
) -> None:
    problem = problem_of(shape, kernel_dtype, device).scatter()
    batch = grouped(problem)
    if device.type == "cpu" and batch.by_row and kernel_dtype is torch.float32:
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


def test_row_is_bitwise_the_same_in_any_company(
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
        problem.site.remove(slot)
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
    settings: dict[str, Any] = {"is_decode": True, "is_static": True, "workspace": workspace}
    first = group_on_device(static, adapters, **settings)
    assert first.by_row is (adapters > 8) and first.acts_at(problem.site)
    for rows in (shape.rows[::-1], (-1,) * len(shape.rows), shape.rows):
        static.copy_(torch.tensor(rows, dtype=torch.int32))
        again = group_on_device(static, adapters, buffers=first.chunks, **settings)
        assert again.num_chunks == first.num_chunks
        workspace.hidden.fill_(torch.nan)
        result = run(problem, first)
        if rows == shape.rows:
            problem.check(result)
        elif set(rows) == {-1}:
            assert torch.equal(result.view(torch.int32), problem.y.view(torch.int32))


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
def test_interpreted() -> None:
    others = ("test_triton_group_rows.py", "test_triton_folded_expand.py")
    files = [__file__, *(str(Path(__file__).with_name(name)) for name in others)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *files],
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 90


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
import re, subprocess, sys
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from loraplex.engine.kernels import (
    triton_embedding, triton_expand, triton_expand_rms_norm, triton_expand_rotary, triton_expand_silu_mul,
    triton_group_rows, triton_shrink,
)

TOOLS = triton.knobs.nvidia
INDICES = ("order", "starts", "ends", "chunk_slots", "row_slots", "places")
LONGS = ("table", "token_ids", "positions")
FLOATS = ("hidden", "cos", "sin")
VALUES = ("x", "y", "out", "residual", "weight", "gate_up", "qkv", "kv_cache", "q_norm", "k_norm")
MULTIPLES = ("inputs", "outputs", "size", "size_0", "size_1", "size_2", "row_stride", "token_stride")
PAGES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32, "int8": tl.int8, "fp8": tl.float8e4nv}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

def kind(name, dtype, names):
    if name == "slots":
        # Of adapters, but where there are those of the cache as well.
        return "*i64" if "chunk_slots" in names else "*i32"
    for types, names in (("*i32", INDICES), ("*i64", LONGS), ("*fp32", FLOATS), ("*" + dtype, VALUES)):
        if name in names:
            return types
    return "fp32" if name in ("epsilon", "key_inverse", "value_inverse") else "i32"

def compiled(kernel, dtype, aligned, warps, constants):
    signature = {n: "constexpr" if n in constants else kind(n, dtype, kernel.arg_names) for n in kernel.arg_names}
    multiples = ("hidden_ranks", *MULTIPLES) if aligned else ("hidden_ranks",)
    arguments = [(i, n, k) for i, (n, k) in enumerate(signature.items()) if k != "constexpr"]
    hinted = [i for i, n, k in arguments if k.startswith("*") or n in multiples]
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(i,): constants[n] for i, n in enumerate(kernel.arg_names) if n in constants},
        attrs={(i,): [["tt.divisibility", 16]] for i in hinted},
    )
    options = {"num_warps": warps, "num_stages": 3, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

def report(dtype, page, aligned, rows, kernel, warps, weights, constants):
    common = {"page_type": PAGES[page], "is_scaled": page in ("int8", "fp8"), "assembly": True, "aligned": aligned}
    common |= {"block_r": 16, "split_k": 1024, "splits": 4, "split_lanes": 4, "block_m": rows} | constants
    constants = {n: v for n, v in common.items() if n in kernel.arg_names}
    binary = compiled(kernel, dtype, aligned, warps, constants)
    with open(sys.argv[1], "wb") as file:
        file.write(binary.asm["cubin"])
    usage = subprocess.run([TOOLS.cuobjdump.path, "-res-usage", sys.argv[1]], capture_output=True, text=True, check=True)
    listing = subprocess.run([TOOLS.nvdisasm.path, "-c", sys.argv[1]], capture_output=True, text=True, check=True)
    resources = next(line for line in usage.stdout.splitlines() if "STACK:" in line)
    instructions = [i for i in re.findall(r"/\\*[0-9a-f]+\\*/\\s+(.*?);", listing.stdout) if "NOP" not in i]
    loads = [i for i, text in enumerate(instructions) if "LDG.E.128" in text]
    barriers = [i for i, text in enumerate(instructions) if "BAR" in text]
    at_once = not barriers or max(loads, default=0) < barriers[0]
    ptx = binary.asm["ptx"]
    wide = "cp.async.cg" in ptx or "ld.global.v4" in ptx
    cores = "wgmma" if "wgmma" in ptx else "mma" if "mma.sync" in ptx else "none"
    name = kernel.__name__.removesuffix("_kernel")
    per_weight = len(instructions) * warps * 32 / weights
    facts = (binary.metadata.shared, wide, cores, f"{per_weight:.2f}", at_once)
    print(name, rows, dtype, page, aligned, *facts, resources)

shrink, expand = triton_shrink, triton_expand
VARIANTS = (
    ("bf16", "bf16", True, (16, 32, 1)),
    ("bf16", "bf16", False, (16, 1)),
    ("bf16", "int8", True, (16, 1)),
    ("bf16", "int8", False, (16, 1)),
    ("bf16", "fp8", True, (16, 1)),
    ("fp16", "fp16", True, (16,)),
)
for dtype, page, aligned, heights in VARIANTS:
    for rows in heights:
        if rows > 1:
            block_k = shrink.tile_inputs(DTYPES[dtype], aligned)
            halves = (
                (shrink.shrink_tile_kernel, shrink.TILE_WARPS, block_k, {"block_k": block_k}),
                (expand.expand_tile_kernel, expand.tile_warps(rows), expand.TILE_N, {"block_n": expand.TILE_N}),
            )
        else:
            warps = expand.row_warps(PAGES[page], aligned)
            halves = (
                (shrink.shrink_row_kernel, shrink.ROW_WARPS, 1024, {"span": shrink.row_span(PAGES[page])}),
                (expand.expand_row_kernel, warps, expand.ROW_N, {"block_n": expand.ROW_N}),
            )
        for kernel, warps, width, constants in halves:
            report(dtype, page, aligned, rows, kernel, warps, width * 16, constants)
norm, rotary, silu = triton_expand_rms_norm, triton_expand_rotary, triton_expand_silu_mul
columns = {"block_n": expand.TILE_N}
report("bf16", "int8", True, 16, silu.expand_silu_mul_kernel, expand.tile_warps(16), 2 * expand.TILE_N * 16, columns)
block = {"block": 4096, "block_r": norm.ranks_at_once(4096), "page_ranks": 16, "has_residual": True}
report("bf16", "int8", True, 1, norm.expand_rms_norm_kernel, norm.warps_for(4096), 4096 * 16, block)
head = {"half": 64, "size": 128, "normed": True, "quantized": True, "block_half": 64, "block_rest": 16}
report("bf16", "int8", True, 16, rotary.expand_rotary_kernel, rotary.NUM_WARPS, 128 * 16, head)
embedding = triton_embedding
report("bf16", "int8", True, 1, embedding.embedding_kernel, embedding.NUM_WARPS, 16384, {"block_n": embedding.BLOCK_N})
for kernel in (triton_group_rows.order_kernel, triton_group_rows.chunk_kernel):
    block = {"block": triton_group_rows.BLOCK, "chunk_rows": 16}
    report("bf16", "bf16", True, 0, kernel, triton_group_rows.NUM_WARPS, 4096, block)
"""

MOST_INSTRUCTIONS = {
    ("shrink_row", "bf16"): 6.5,
    ("shrink_row", "int8"): 7.0,
    ("shrink_row", "fp8"): 6.3,
    ("expand_row", "bf16"): 6.0,
    ("expand_row", "int8"): 5.5,
    ("expand_row", "fp8"): 4.8,
}
"""Per weight of rank 16, the whole program from its first load to its last store. On an H200 15.6 for bf16 and 7.8 for
8-bit pages would take as long as the bytes."""


@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
def test_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(tmp_path / "kernel.cubin")],
        check=False,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ".src"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    variants = done.stdout.splitlines()
    assert len(variants) == 30
    for variant in variants:
        name, rows, dtype, page, aligned, shared, wide, cores, per_weight, at_once = variant.split()[:10]
        assert int(shared) <= MAX_SHARED_BYTES, variant
        assert re.search(r"\bSTACK:0\b", variant) and re.search(r"\bLOCAL:0\b", variant), variant
        if rows == "0":
            continue
        assert aligned == "False" or wide == "True", f"loads are not vectorised: {variant}"
        assert cores == ("mma" if int(rows) > 1 and dtype != "fp32" else "none"), variant
        if (name, page) in MOST_INSTRUCTIONS and aligned == "True":
            assert 2 < float(per_weight) <= MOST_INSTRUCTIONS[name, page], variant
            assert at_once == "True", f"a load waits for another: {variant}"
