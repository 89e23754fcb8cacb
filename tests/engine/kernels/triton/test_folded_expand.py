"""Expand folded into the next kernel equals expand before it. Interpreted in the process that `test_sgmv` starts."""

from typing import Any

import pytest
import torch

from loraplex.engine.kernels import dispatch
from loraplex.engine.kernels.group_rows import group_rows
from loraplex.engine.kernels.rms_norm import rms_norm
from loraplex.engine.kernels.rotary import rotary_write_kv
from loraplex.engine.kernels.silu_mul import silu_mul
from loraplex.engine.kernels.triton import rms_norm as triton_rms_norm
from loraplex.engine.layers.lora_linear import LoraLinear
from loraplex.engine.lora.device_batch import DeviceLoraBatch, LoraPath

pytest.importorskip("triton")

ROWS = (1, 0, -1, 0, 5, 1, 1, -1)
"""Slot 5 has no adapter."""
PAGES: dict[str, torch.dtype | None] = {"model": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
EPSILON = 1e-5


@pytest.fixture
def device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Use the Triton backend for the CPU's tensors."""
    monkeypatch.setattr(dispatch, "_cpu_backend", lambda: dispatch.KernelBackend.TRITON)
    return device


@pytest.fixture(params=PAGES)
def pages(request: pytest.FixtureRequest) -> torch.dtype | None:
    return PAGES[request.param]


class Operands:
    """y with its adapters' part, and y with that part pending."""

    def __init__(
        self,
        problem_of: Any,
        shape_of: Any,
        inputs: int,
        sizes: tuple[int, ...],
        device: torch.device,
        pages: Any,
    ) -> None:
        ranks = {0: (8, 17, 40)[: len(sizes)], 1: (0, 3, 16)[-len(sizes) :]}
        shape = shape_of(inputs, sizes, ranks, ROWS)
        self.problem = problem_of(shape, torch.float32, device, page_dtype=pages).scatter()
        self.problem.x.nan_to_num_(0.0)
        generator = torch.Generator().manual_seed(7)
        self.base = torch.randn(len(ROWS), sum(sizes), generator=generator).to(device)
        batch = group_rows(ROWS, device)
        assert isinstance(batch, DeviceLoraBatch) and batch.path is LoraPath.FOLDED
        layer = LoraLinear(lambda _: self.base.clone(), self.problem.site)  # type: ignore[arg-type]
        self.whole = layer(self.problem.x, batch)
        part, delta = layer.deferred(self.problem.x, batch)
        assert delta is not None and torch.equal(part, self.base)
        self.part, self.delta = part, delta


@pytest.fixture
def operands(problem_of: Any, shape_of: Any, device: torch.device, pages: torch.dtype | None) -> Any:
    return lambda *sizes, inputs=40: Operands(problem_of, shape_of, inputs, sizes, device, pages)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert not ours.isnan().any()
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def test_into_silu_mul(operands: Any) -> None:
    given = operands(150, 150)
    before = given.part.clone()
    close(silu_mul(given.part, given.delta), silu_mul(given.whole))
    assert torch.equal(given.part, before)


@pytest.mark.parametrize("has_residual", [True, False])
def test_into_rms_norm(operands: Any, device: torch.device, has_residual: bool) -> None:
    given = operands(100)
    weight = torch.randn(100, generator=torch.Generator().manual_seed(1)).to(device)
    ours = torch.randn(len(ROWS), 100, device=device)
    theirs = ours.clone()
    result = rms_norm(given.part, ours if has_residual else None, weight, EPSILON, given.delta)
    close(result, rms_norm(given.whole, theirs if has_residual else None, weight, EPSILON))
    close(ours, theirs)


@pytest.mark.parametrize(("half", "normed"), [(0, True), (5, True), (8, False)])
def test_into_rotary_and_the_kv_write(
    operands: Any, device: torch.device, pages: torch.dtype | None, half: int, normed: bool
) -> None:
    if pages is not None and (half != 8 or normed):
        pytest.skip("nothing new about pages")
    size, heads, kv_heads = 16, 2, 1
    given = operands(heads * size, kv_heads * size, kv_heads * size)
    generator = torch.Generator().manual_seed(half)
    angles = torch.rand(64, max(half, 1), generator=generator).to(device)
    rope = (angles.cos(), angles.sin()) if half else None
    norms = tuple(torch.randn(2, size, generator=generator).to(device)) if normed else None
    positions = torch.arange(len(ROWS), device=device) * 3
    slots = torch.tensor([4, 9, 2, -1, 7, 0, 11, 3], device=device)
    caches = torch.full((2, 3, 4, 2, kv_heads, size), torch.nan, device=device)
    rotary_write_kv(given.part, caches[0], positions, slots, rope, norms, EPSILON, (1.0, 1.0), given.delta)
    rotary_write_kv(given.whole, caches[1], positions, slots, rope, norms, EPSILON)
    queries_and_keys = (heads + kv_heads) * size
    close(given.part[:, :queries_and_keys], given.whole[:, :queries_and_keys])
    torch.testing.assert_close(caches[0], caches[1], atol=2e-5, rtol=2e-5, equal_nan=True)
    assert caches[0].isnan().any() and not caches[0].isnan().all()


@pytest.mark.parametrize("reader", ["silu_mul", "rms_norm", "rotary"])
def test_partial_sums_of_long_inputs(
    operands: Any,
    device: torch.device,
    pages: torch.dtype | None,
    reader: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two or three splits of K, and a row so wide that a norm takes a page in several turns."""
    if pages is not None:
        pytest.skip("nothing new about pages")
    if reader == "silu_mul":
        given = operands(24, 24, inputs=1040)
        close(silu_mul(given.part, given.delta), silu_mul(given.whole))
    elif reader == "rms_norm":
        monkeypatch.setattr(triton_rms_norm, "TILE_VALUES", 4 * 128)
        given = operands(100, inputs=2100)
        weight = torch.ones(100, device=device)
        ours = rms_norm(given.part, None, weight, EPSILON, given.delta)
        close(ours, rms_norm(given.whole, None, weight, EPSILON))
    else:
        given = operands(32, 16, 16, inputs=1040)
        slots = positions = torch.arange(len(ROWS), device=device)
        caches = torch.full((2, 2, 4, 2, 1, 16), torch.nan, device=device)
        rotary_write_kv(given.part, caches[0], positions, slots, None, None, EPSILON, delta=given.delta)
        rotary_write_kv(given.whole, caches[1], positions, slots, None, None, EPSILON)
        close(caches[0], caches[1])
        close(given.part[:, :48], given.whole[:, :48])


def test_nothing_pends_in_other_steps(problem_of: Any, shape_of: Any, device: torch.device) -> None:
    """Of prompts, deterministic ones, and those of many adapters."""
    rows = tuple(range(9))
    problem = problem_of(shape_of(40, (32,), {0: (8,)}, rows), torch.float32, device)
    problem.x.nan_to_num_(0.0)
    layer = LoraLinear(lambda _: problem.y.clone(), problem.site)  # type: ignore[arg-type]
    few = [row % 2 for row in rows]
    others = group_rows(few, device, 4), group_rows(few, device, deterministic=True), group_rows(rows, device)
    for batch in (None, *others):
        assert layer.deferred(problem.x, batch)[1] is None
