"""LoRA problems of awkward shapes, shared by every backend of SGMV, with NaN (and -0.0) where no kernel may read or write.

Invariant: base rows, absent slices, and the memory around every matrix are poisoned, so one wrong access is visible.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from tests.engine.interpreter_runs import INTERPRETING
from tests.engine.lora.installed_slices import install
from torch import Tensor

from loraplex.engine.lora.batch import HostLoraBatch, group_rows
from loraplex.engine.lora.page_geometry import ALIGNMENT, PAGE_RANKS
from loraplex.engine.lora.site import A_PAGES, LoraSite, LoraSlice, make_site

Ranks = dict[int, tuple[int, ...]]

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class Shape:
    """`ranks` by slot and slice, 0 for an absent slice; `rows` is the slot of each row, -1 the base model."""

    inputs: int
    sizes: tuple[int, ...]
    ranks: Ranks
    rows: tuple[int, ...]


SHAPES = {
    "one row": Shape(64, (48,), {2: (8,)}, (2,)),
    "rank 1, one column": Shape(64, (1, 8), {0: (1, 1)}, (0, -1, 0)),
    "odd widths": Shape(37, (29, 3), {0: (17, 1), 1: (0, 8)}, (1, 0, -1, 0, 1, 1)),
    "ranks mixed": Shape(
        96,
        (64, 32, 32),
        {0: (1, 8, 17), 3: (64, 0, 1), 4: (0, 0, 0), 7: (17, 64, 8)},
        (7, -1, 0, 3, 3, 4, 7, 5, 0, 0, -1, 0),
    ),
    "129 rows": Shape(64, (40, 24), {1: (16, 8)}, (1,) * 129),
    "large among small": Shape(
        64, (40, 24), {0: (8, 17), 1: (64, 0), 2: (0, 1)}, (0, 1, 2) * 15 + (-1,) * 5 + (1,) * 20
    ),
    "many adapters": Shape(
        128, (72,), {slot: (1 + 5 * slot,) for slot in range(13)}, tuple(range(13)) + (-1, 12, 0)
    ),
    "many pages": Shape(48, (40, 8), {0: (256, 17), 1: (0, 100)}, (1, 0, -1, 1)),
    "long rows": Shape(2100, (264,), {0: (17,), 6: (64,)}, (6, 0, -1, 6)),
}


@dataclass(slots=True)
class Problem:
    """Operands of one call. `y` is what stands there before."""

    shape: Shape
    site: LoraSite
    x: Tensor
    y: Tensor
    batch: HostLoraBatch | None
    pages: list[Tensor] = field(default_factory=list)

    def expected(self) -> Tensor:
        """Row by row in float64; what no adapter changes is `y` itself."""
        result = self.y.double()
        for row, slot in enumerate(self.shape.rows):
            for s, part in enumerate(self.site.slots.get(slot, ())):
                if part is not None:
                    columns = slice(self.site.host_offsets[s], self.site.host_offsets[s + 1])
                    hidden = part.a.double() @ self.x[row].double()
                    if part.scales is not None:
                        hidden *= part.scales.double()
                    result[row, columns] += hidden @ part.b.double()
        return result

    def touched(self) -> Tensor:
        """Where adapters act, as booleans of the shape of `y`."""
        touched = torch.zeros_like(self.y, dtype=torch.bool)
        for row, slot in enumerate(self.shape.rows):
            for s, part in enumerate(self.site.slots.get(slot, ())):
                if part is not None:
                    touched[row, self.site.host_offsets[s] : self.site.host_offsets[s + 1]] = True
        return touched

    def scatter(self, seed: int = 0) -> "Problem":
        """Move every page to memory of its own, in any order, between bytes that are NaN (or -1)."""
        generator = torch.Generator().manual_seed(seed)
        places = []
        for slot, parts in self.site.slots.items():
            for s, part in enumerate(parts):
                for first, matrix in ((0, part.a), (self.site.max_pages, part.b)) if part is not None else ():
                    pages = enumerate(torch.split(matrix, PAGE_RANKS))
                    places += [(slot, s, A_PAGES + first + i, page) for i, page in pages]
        for i in torch.randperm(len(places), generator=generator).tolist():
            slot, s, column, page = places[i]
            fence = 8 * ALIGNMENT
            memory = torch.full((page.nbytes + 2 * fence,), 0xFF, dtype=torch.uint8, device=page.device)
            memory[fence : fence + page.nbytes] = page.contiguous().view(torch.uint8).flatten()
            self.pages.append(memory)
            self.site.table[slot, s, column] = memory.data_ptr() + fence
        return self

    def check(self, result: Tensor) -> None:
        """Close where adapters act; elsewhere the same bits as before."""
        touched = self.touched()
        assert torch.equal(bits(result)[~touched], bits(self.y)[~touched])
        tolerance = TOLERANCES[self.y.dtype]
        torch.testing.assert_close(
            result.double()[touched], self.expected()[touched], atol=4 * tolerance, rtol=tolerance
        )


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: NaN equals NaN, 0.0 differs from -0.0."""
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def fenced(tensor: Tensor) -> Tensor:
    """A copy between two runs of NaN, at the alignment sites ask for."""
    fence = ALIGNMENT // tensor.element_size() * 8
    memory = torch.full((tensor.numel() + 2 * fence,), torch.nan, dtype=tensor.dtype, device=tensor.device)
    copy = memory[fence : fence + tensor.numel()].view(tensor.shape)
    return copy.copy_(tensor)


def quantized(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows as `dtype` and their scales."""
    most = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    scales = values.abs().amax(dim=1).float() / most
    scaled = values.float() / scales[:, None]
    return (scaled if dtype.is_floating_point else scaled.round()).to(dtype), scales


def make_slice(a: Tensor, b: Tensor, page_dtype: torch.dtype | None) -> LoraSlice:
    """A [rank, inputs] and B [rank, outputs] as pages hold them."""
    if page_dtype is None:
        return LoraSlice(a, b)
    (qa, a_scales), (qb, b_scales) = quantized(a, page_dtype), quantized(b, page_dtype)
    return LoraSlice(qa, qb, fenced(a_scales * b_scales))


def make_problem(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    page_dtype: torch.dtype | None = None,
) -> Problem:
    """Values of about 1 everywhere, so that a tolerance is about the type and not about the shape."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(size, generator=generator) * scale
        return fenced(values.to(device, dtype))

    slots = max([*shape.ranks, *shape.rows]) + 1
    names = tuple(f"slice {s}" for s in range(len(shape.sizes)))
    site = make_site(names, shape.inputs, shape.sizes, slots, device)
    x, y = random(len(shape.rows), shape.inputs), random(len(shape.rows), sum(shape.sizes))
    site.page_dtype = page_dtype
    for slot, ranks in shape.ranks.items():
        parts = tuple(
            make_slice(
                random(rank, shape.inputs, scale=shape.inputs**-0.5),
                random(rank, size, scale=rank**-0.5),
                page_dtype,
            )
            if rank
            else None
            for rank, size in zip(ranks, shape.sizes, strict=True)
        )
        install(site, slot, parts)
    problem = Problem(shape, site, x, y, group_rows(shape.rows, device))
    touched = problem.touched()
    x[~touched.any(dim=1)] = torch.nan
    # -0.0 as well: adding nothing to it would turn it into 0.0.
    poison = torch.where(torch.arange(y.shape[1], device=device) % 2 == 0, torch.nan, -0.0).to(dtype)
    y[~touched] = poison.expand_as(y)[~touched]
    return problem


@pytest.fixture
def problem_of() -> Callable[..., Problem]:
    return make_problem


@pytest.fixture
def shape_of() -> type[Shape]:
    """Shapes of a test's own."""
    return Shape


@pytest.fixture(params=list(SHAPES.values()), ids=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> Shape:
    """Every awkward shape in turn."""
    chosen: Shape = request.param
    return chosen


@pytest.fixture(params=list(TOLERANCES), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The types that the compiled kernels take."""
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Torch's thread count during the test; skips where the CPU has no compiled kernels."""
    from loraplex.engine.kernels.cpu import numba_bridge

    if not numba_bridge.is_available():
        pytest.skip("this CPU has no compiled body")
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=["interpreter"] if INTERPRETING else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where this process can run kernels; uninitialised memory is full of NaN. The interpreter has a process of its own."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield torch.device("cpu" if request.param == "interpreter" else "cuda")
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def every_combination(request: pytest.FixtureRequest, device: torch.device) -> bool:
    """Whether all combinations of parameters run: on CUDA and with `--long`. The interpreter takes a second for each."""
    return device.type == "cuda" or bool(request.config.getoption("--long"))


@pytest.fixture
def spread(every_combination: bool) -> Callable[..., None]:
    """`spread((all values, this one), ...)` skips a test whose value of the last parameter is not in turn.

    What is left has every pair of the others' values, each with one value of the last, which alternates.
    """

    def spread(*places: tuple[Sequence[object], object]) -> None:
        if every_combination:
            return
        turn = sum(values.index(value) for values, value in places)
        if turn % len(places[-1][0]):
            pytest.skip("runs with --long")

    return spread


@pytest.fixture
def kernel_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """A dtype that kernels compute in here."""
    if dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter's bfloat16 arithmetic is wrong")
    return dtype
