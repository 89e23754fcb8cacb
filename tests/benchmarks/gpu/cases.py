"""What is built, checked and timed, in order of value: kernels by operation, then the model in the engine.

Invariant: a case's name is its problem's, so that lines of different stages and runs meet under one name.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.benchmarks.kernels.attention import decode_problem, prefill_problem, prefills_problem, sdpa_problem
from tests.benchmarks.kernels.elementwise import (
    bitmask_problem,
    cutoff_problem,
    norm_problem,
    rotary_problem,
    silu_problem,
)
from tests.benchmarks.kernels.gemm import PEERS, gemm_problem, round_rows_problem
from tests.benchmarks.kernels.lora import embedding_problem, layer_problem, pair_problem
from tests.benchmarks.kernels.lora_folded import READERS, folded_problem
from tests.benchmarks.kernels.problem import Problem
from tests.benchmarks.kernels.shapes import LLAMA_3_8B, TINY, LayerShape

OPERATIONS = ("lora", "gemm", "attention", "elementwise")
PEERS_OPERATION = "peers"
ZIPF = 1.1
DTYPE = "bfloat16"
DRY_DTYPE = "float16"
"""The interpreter's bfloat16 arithmetic is wrong."""


@dataclass(frozen=True, slots=True)
class Case:
    """`tier` 1 is what the issue's table asks for; `operation` is the process it runs in."""

    operation: str
    problem: Problem
    tier: int

    @property
    def name(self) -> str:
        return self.problem.name

    @property
    def is_compiled(self) -> bool:
        """Whether kernels of ours run in it: an fp8 product is torch's, and its operands must have values."""
        return not self.problem.is_peer and (self.problem.op, self.problem.variant) != ("gemm", "fp8")


def kernel_cases(*, is_dry: bool) -> list[Case]:
    """All of them, by tier, then by operation, the most telling first."""
    found = _dry() if is_dry else _real(LLAMA_3_8B)
    order = (*OPERATIONS, PEERS_OPERATION)
    return sorted(found, key=lambda case: (case.tier, order.index(case.operation)))


def _real(model: LayerShape) -> list[Case]:
    return [*_loras(model), *_gemms(model), *_attentions(model), *_elementwise(model), *_peers(model)]


def _dry() -> list[Case]:
    """One of every kind, as small as the kernels' tiles allow."""
    dtype, width = DRY_DTYPE, 64
    problems = {
        "lora": [
            pair_problem(3, 2, 8, width, width, dtype, dtype),
            pair_problem(9, 9, 8, width, width, dtype, "int8"),
            pair_problem(9, 9, 8, width, width, dtype, dtype, ZIPF),
            embedding_problem(TINY, 3, 2, 4, dtype, dtype),
            *(folded_problem(reader, TINY, 3, 2, 8, dtype, dtype) for reader in READERS),
        ],
        "gemm": [gemm_problem(variant, 2, 32, 128, dtype) for variant in ("int8", "int4 zeros", "torch mm")],
        "attention": [
            decode_problem(TINY, 2, 20, dtype, dtype),
            prefills_problem(TINY, [(5, 20), (3, 3)], dtype, dtype),
        ],
        "elementwise": [
            norm_problem(TINY, 2, dtype),
            rotary_problem(TINY, 2, dtype, dtype, qk_norm=True),
            silu_problem(TINY, 2, dtype),
            bitmask_problem(TINY, 2, dtype),
            cutoff_problem(TINY, 2),
        ],
        PEERS_OPERATION: [
            sdpa_problem(TINY, 2, 20, dtype),
            *(gemm_problem(peer, 2, 32, 128, "bfloat16") for peer in PEERS[1:]),
        ],
    }
    return [Case(name, problem, 1) for name, group in problems.items() for problem in group]


def _loras(model: LayerShape) -> Iterator[Case]:
    width = model.hidden
    for pages in (DTYPE, "int8", "fp8"):
        yield Case("lora", pair_problem(64, 64, 16, width, width, DTYPE, pages), 1)
        yield Case("lora", layer_problem(model, 64, 64, 16, DTYPE, pages), 1)
    yield Case("lora", pair_problem(64, 64, 16, width, width, DTYPE, DTYPE, ZIPF), 1)
    yield Case("lora", layer_problem(model, 64, 64, 16, DTYPE, DTYPE, ZIPF), 1)
    for rows, adapters in ((1, 1), (16, 1), (64, 1), (16, 16), (64, 16)):
        yield Case("lora", layer_problem(model, rows, adapters, 16, DTYPE, DTYPE), 2)
    for rows in (1, 16):
        for reader in READERS:
            yield Case("lora", folded_problem(reader, model, rows, 1, 16, DTYPE, DTYPE), 2)
    yield Case("lora", folded_problem("silu", model, 16, 1, 16, DTYPE, "int8"), 2)
    yield Case("lora", embedding_problem(model, 64, 16, 16, DTYPE, DTYPE), 2)
    for rank in (8, 64, 256):
        yield Case("lora", pair_problem(64, 64, rank, width, width, DTYPE, DTYPE), 2)
    yield Case("lora", layer_problem(model, 512, 2, 16, DTYPE, DTYPE, decodes=64), 2)


def _gemms(model: LayerShape) -> Iterator[Case]:
    for rows in (1, 16, 64):
        for name, (outputs, inputs) in model.products().items():
            tier = 1 if name in ("o", "gate_up") else 2
            for variant in ("int4 zeros", "torch mm", "int8"):
                yield Case("gemm", gemm_problem(variant, rows, outputs, inputs, DTYPE), tier)
            for variant in ("int4", "fp8"):
                yield Case("gemm", gemm_problem(variant, rows, outputs, inputs, DTYPE), 2)
    for variant in ("int4 zeros", "int8", "torch mm"):
        outputs, inputs = model.products()["gate_up"]
        yield Case("gemm", gemm_problem(variant, 512, outputs, inputs, DTYPE), 2)

    yield Case("gemm", round_rows_problem(64, model.hidden, DTYPE), 2)


def _attentions(model: LayerShape) -> Iterator[Case]:
    for context in (8192, 512):
        for kv in (DTYPE, "fp8"):
            yield Case("attention", decode_problem(model, 64, context, DTYPE, kv), 1)
    for rows, context in ((1, 8192), (1, 512), (16, 2048)):
        yield Case("attention", decode_problem(model, rows, context, DTYPE, DTYPE), 2)
    ragged = [(300, 300), (100, 1100), (7, 2055), (512, 512), (105, 105)]
    yield Case("attention", prefills_problem(model, ragged, DTYPE, DTYPE), 1)
    for chunk, length in ((512, 512), (512, 8192), (2048, 2048)):
        yield Case("attention", prefill_problem(model, chunk, length, DTYPE, DTYPE), 2)


def _elementwise(model: LayerShape) -> Iterator[Case]:
    for rows in (64, 1, 512):
        tier = 1 if rows == 64 else 2
        yield Case("elementwise", norm_problem(model, rows, DTYPE), tier)
        yield Case("elementwise", rotary_problem(model, rows, DTYPE, DTYPE, qk_norm=False), tier)
        yield Case("elementwise", silu_problem(model, rows, DTYPE), tier)
    yield Case("elementwise", rotary_problem(model, 64, DTYPE, DTYPE, qk_norm=True), 2)
    yield Case("elementwise", rotary_problem(model, 64, DTYPE, "fp8", qk_norm=False), 2)
    yield Case("elementwise", bitmask_problem(model, 64, DTYPE), 2)
    yield Case("elementwise", cutoff_problem(model, 64), 2)


def _peers(model: LayerShape) -> Iterator[Case]:
    """Other libraries' kernels at the shapes of ours."""
    for context in (8192, 512):
        yield Case(PEERS_OPERATION, sdpa_problem(model, 64, context, DTYPE), 1)
    for rows in (1, 16, 64):
        for name, (outputs, inputs) in model.products().items():
            for variant in PEERS[1:]:
                problem = gemm_problem(variant, rows, outputs, inputs, DTYPE)
                yield Case(PEERS_OPERATION, problem, 1 if name in ("o", "gate_up") else 2)
