"""The Triton kernels between the products: RMSNorm, rotary with the KV write, SiLU-mul.

They run interpreted on the CPU (a process of its own: the switch is read at import), compiled for sm_90 without a GPU, and
on CUDA where there is one. All memory around operands, and all that is not yet written, is NaN.
"""

import pytest
import torch
from tests.engine.interpreter_runs import INTERPRETING, InterpreterRuns
from torch import Tensor

from loraplex.engine.kernels import rms_norm, rotary, silu_mul
from loraplex.engine.kernels.dispatch import KernelBackend
from loraplex.engine.kernels.reference import rms_norm as reference_norm
from loraplex.engine.kernels.reference import rotary as reference_rotary

pytest.importorskip("triton")

MAX_SHARED_BYTES = 227 << 10
"""What one block may have on sm_90."""
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPSILON = 1e-5
SHAPES = [(1, 64), (3, 37), (33, 96), (2, 2100)]
BLOCKS, BLOCK_SIZE, POSITIONS = 4, 16, 500
# heads, KV heads, head size, rotated half (0: a layer without positions), q/k norm
CASES = [
    (1, 1, 16, 8, False),
    (4, 2, 64, 32, True),
    (6, 2, 96, 24, False),
    (20, 2, 128, 64, True),
    (4, 4, 32, 0, False),
    (4, 2, 32, 0, True),
    (3, 1, 80, 10, True),
]


@pytest.fixture
def device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Use the Triton backend for the CPU's tensors."""
    for module in (rms_norm, rotary, silu_mul):
        monkeypatch.setattr(module, "backend_for", lambda _: KernelBackend.TRITON)
    return device


def random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> Tensor:
    """Values between two runs of NaN."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale
    memory = torch.full((values.numel() + 512,), torch.nan, dtype=dtype, device=device)
    memory[256:-256] = values.flatten().to(device, dtype)
    return memory[256:-256].view(shape)


def fences_stand(tensor: Tensor) -> bool:
    memory = tensor._base
    return memory is not None and bool(memory[:256].isnan().all() and memory[-256:].isnan().all())


def check(result: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[result.dtype]
    torch.testing.assert_close(result.double(), expected.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_equals_the_definition(
    shape: tuple[int, int], kernel_dtype: torch.dtype, device: torch.device, with_residual: bool
) -> None:
    x, weight = random(shape, kernel_dtype, device), random((shape[1],), kernel_dtype, device)
    residual = random((shape[0], shape[1], 1), kernel_dtype, device)[..., 0] if with_residual else None
    before, expected_residual = x.clone(), None if residual is None else residual.clone()
    reference_norm.rms_norm(x.clone(), expected_residual, weight, EPSILON)
    result = rms_norm.rms_norm(x, residual, weight, EPSILON)
    summed = (x if expected_residual is None else expected_residual).double()
    check(result, summed / (summed.pow(2).mean(1, keepdim=True) + EPSILON).sqrt() * weight.double())
    assert torch.equal(x, before)
    if residual is not None and expected_residual is not None:
        assert torch.equal(residual, expected_residual), "the residual is added and rounded as torch does"
        assert fences_stand(residual)


def test_rows_of_a_norm_know_nothing_of_each_other(device: torch.device) -> None:
    x, residual = random((5, 96), torch.float32, device), random((5, 96, 1), torch.float32, device)[..., 0]
    weight = torch.ones(96, device=device)
    together = rms_norm.rms_norm(x, residual.clone(), weight, EPSILON)
    alone = [rms_norm.rms_norm(x[i : i + 1], residual[i : i + 1].clone(), weight, EPSILON) for i in range(5)]
    assert torch.equal(torch.cat(alone), together)
    x[2, 5] = torch.nan
    result = rms_norm.rms_norm(x, residual.clone(), weight, EPSILON)
    assert result[2].isnan().all()
    assert torch.equal(result[[0, 1, 3, 4]], together[[0, 1, 3, 4]])


def test_epsilon_decides_for_rows_of_tiny_values(device: torch.device) -> None:
    x = torch.full((2, 64), 1e-4, device=device)
    x[1] = 0.0
    for epsilon in (1e-5, 1e-8):
        check(
            rms_norm.rms_norm(x, None, torch.ones(64, device=device), epsilon),
            reference_norm.rms_norm(x, None, torch.ones(64, device=device), epsilon),
        )


@pytest.mark.parametrize("shape", [(1, 48), (5, 37), (3, 1536)])
def test_silu_mul_equals_the_definition(
    shape: tuple[int, int], kernel_dtype: torch.dtype, device: torch.device
) -> None:
    gate_up = random((shape[0], 2 * shape[1]), kernel_dtype, device, 4.0)
    gate_up[:, :6] = torch.tensor([0.0, -0.0, 90.0, -90.0, 500.0, -500.0], device=device)
    gate, up = gate_up.double().chunk(2, dim=1)
    check(silu_mul.silu_mul(gate_up), gate / (1 + torch.exp(-gate)) * up)
    gate_up[0, 3] = torch.nan
    assert silu_mul.silu_mul(gate_up).isnan().nonzero().tolist() == [[0, 3]]


def test_no_rows_are_no_work(device: torch.device) -> None:
    nothing = torch.empty(0, 64, device=device)
    assert rms_norm.rms_norm(nothing, nothing.clone(), torch.ones(64, device=device), EPSILON).shape == (
        0,
        64,
    )
    assert silu_mul.silu_mul(nothing).shape == (0, 32)


class Operands:
    """A step's tokens in no order of slots; the KV cache holds NaN."""

    def __init__(
        self, tokens: int, case: tuple[int, int, int, int, bool], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.heads, self.kv_heads, self.size, half, normed = case
        generator = torch.Generator().manual_seed(tokens)
        self.qkv = random((tokens, (self.heads + 2 * self.kv_heads) * self.size), dtype, device)
        self.positions = torch.randint(0, POSITIONS, (tokens,), generator=generator).to(device)
        self.slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:tokens].to(device)
        angles = torch.arange(POSITIONS).unsqueeze(1) * torch.logspace(0, -3, max(half, 1)).unsqueeze(0)
        self.rope = (angles.cos().to(device), angles.sin().to(device)) if half else None
        weights = random((2, self.size), dtype, device) + 1
        self.norms = (weights[0], weights[1]) if normed else None

    def run(
        self, body: object, cache_dtype: torch.dtype, kv_scales: tuple[float, float] = (1.0, 1.0)
    ) -> tuple[Tensor, Tensor]:
        """(qkv, cache) after the call."""
        qkv = torch.empty_like(torch.cat((self.qkv, self.qkv)))[: len(self.qkv)].copy_(self.qkv)
        shape = (BLOCKS, BLOCK_SIZE, 2, self.kv_heads, self.size)
        cache = torch.full(shape, torch.nan, device=qkv.device).to(cache_dtype)
        body.rotary_write_kv(  # type: ignore[attr-defined]
            qkv, cache, self.positions, self.slots, self.rope, self.norms, EPSILON, kv_scales
        )
        assert qkv._base is not None and qkv._base[len(qkv) :].isnan().all()
        return qkv, cache


def check_untouched(operands: Operands, cache: Tensor) -> None:
    flat = cache.float().view(-1, 2 * operands.kv_heads * operands.size)
    untouched = torch.ones(len(flat), dtype=torch.bool, device=flat.device)
    untouched[operands.slots[operands.slots >= 0]] = False
    assert flat[untouched].isnan().all()


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rotary_equals_the_reference(
    case: tuple[int, int, int, int, bool], tokens: int, kernel_dtype: torch.dtype, device: torch.device
) -> None:
    operands = Operands(tokens, case, kernel_dtype, device)
    qkv, cache = operands.run(rotary, kernel_dtype)
    tolerance = 4 * TOLERANCES[kernel_dtype]
    torch.testing.assert_close(
        qkv, operands.run(reference_rotary, kernel_dtype)[0], atol=tolerance, rtol=tolerance
    )
    flat = cache.view(-1, 2 * operands.kv_heads * operands.size)
    assert torch.equal(flat[operands.slots], qkv[:, operands.heads * operands.size :])
    check_untouched(operands, cache)


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_rotary_into_a_cache_of_8_bits(
    case: tuple[int, int, int, int, bool], kernel_dtype: torch.dtype, device: torch.device
) -> None:
    operands = Operands(9, case, kernel_dtype, device)
    qkv, cache = operands.run(rotary, torch.float8_e4m3fn, (0.5, 3.0))
    written = cache.float().view(-1, 2, operands.kv_heads, operands.size)[operands.slots]
    kv = qkv[:, operands.heads * operands.size :].view(written.shape)
    expected = reference_rotary.e4m3(kv, (0.5, 3.0)).float()
    assert torch.equal(written, expected), "exactly what torch makes of the rounded keys and values"
    check_untouched(operands, cache)


def test_every_value_of_8_bits_and_what_lies_between(device: torch.device) -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    operands = Operands(32, (0, 16, 64, 0, False), torch.float16, device)
    operands.qkv = halves.view(32, 2048).to(device)
    cache = operands.run(rotary, torch.float8_e4m3fn)[1]
    expected = operands.run(reference_rotary, torch.float8_e4m3fn)[1]
    bits, wanted = cache.view(torch.uint8).to(torch.int32), expected.view(torch.uint8).to(torch.int32)
    is_nan = wanted % 128 == 127
    assert torch.equal(bits[~is_nan], wanted[~is_nan])
    assert bool((bits[is_nan] % 128 == 127).all())


@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_nan_stays_with_its_token(case: tuple[int, int, int, int, bool], device: torch.device) -> None:
    operands = Operands(5, case, torch.float32, device)
    clean, _ = operands.run(rotary, torch.float32)
    operands.qkv[3] = torch.nan
    qkv, cache = operands.run(rotary, torch.float32)
    others = [0, 1, 2, 4]
    assert qkv[3].isnan().all()
    assert torch.equal(qkv[others], clean[others])
    written = cache.view(-1, 2, operands.kv_heads, operands.size)[operands.slots[others]]
    assert not written.isnan().any()


def test_tokens_without_a_slot_are_not_cached(device: torch.device) -> None:
    operands = Operands(5, CASES[1], torch.float32, device)
    operands.slots[2] = -1
    _, cache = operands.run(rotary, torch.float32)
    check_untouched(operands, cache)


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter's process")
@pytest.mark.interpreted(__file__, seconds=20)
def test_interpreted(interpreter_runs: InterpreterRuns, request: pytest.FixtureRequest) -> None:
    assert interpreter_runs.passed(request.node) >= 60
