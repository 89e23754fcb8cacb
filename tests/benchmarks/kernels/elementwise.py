"""What stands between the products: norm, rotation with the KV write, activation, and the bitmask of grammars."""

import torch
from tests.benchmarks.kernels.problem import DTYPES, Operands, Problem, TensorSource, size_of, widened
from tests.benchmarks.kernels.shapes import LayerShape
from torch import Tensor

from loraplex.engine.kernels.bitmask import apply_bitmask
from loraplex.engine.kernels.reference import bitmask as reference_bitmask
from loraplex.engine.kernels.reference import rms_norm as reference_norm
from loraplex.engine.kernels.reference import rotary as reference_rotary
from loraplex.engine.kernels.reference import silu_mul as reference_silu
from loraplex.engine.kernels.rms_norm import rms_norm
from loraplex.engine.kernels.rotary import rotary_write_kv
from loraplex.engine.kernels.silu_mul import silu_mul

EPSILON = 1e-5
BLOCK = 16
POSITIONS = 8192


def norm_problem(model: LayerShape, rows: int, dtype: str) -> Problem:
    """residual += x, and its norm."""
    elements = rows * model.hidden

    def make(tensors: TensorSource) -> Operands:
        x, residual = (tensors.normal(rows, model.hidden, dtype=DTYPES[dtype]) for _ in range(2))
        weight = tensors.normal(model.hidden, dtype=DTYPES[dtype])

        def expected() -> tuple[Tensor, ...]:
            # The sum is stored in the rows' type, and the norm is of what is stored.
            wide = (residual.float() + x.float()).to(x.dtype).float()
            return reference_norm.rms_norm(wide, None, weight.float(), EPSILON), wide

        return Operands(lambda: (rms_norm(x, residual, weight, EPSILON), residual), expected)

    return Problem(
        op="rms norm",
        variant="residual",
        shape={"rows": rows, "hidden": model.hidden},
        dtype=dtype,
        bytes=(4 * elements + model.hidden) * size_of(dtype),
        flops=5 * elements,
        make=make,
    )


def rotary_problem(model: LayerShape, rows: int, dtype: str, kv_dtype: str, qk_norm: bool) -> Problem:
    """Rotate q and k in place, write k and v to the cache; with the norms of q and k where the model has them."""
    columns = model.q_size + 2 * model.kv_size
    rotated = model.q_size + model.kv_size

    def make(tensors: TensorSource) -> Operands:
        qkv = tensors.normal(rows, columns, dtype=DTYPES[dtype])
        blocks = rows // BLOCK + 2
        cache = tensors.normal(blocks, BLOCK, 2, model.kv_heads, model.head_dim, dtype=DTYPES[dtype]).to(
            DTYPES[kv_dtype]
        )
        positions = tensors.integers(0, POSITIONS, rows, dtype=torch.int64)
        slots = tensors.permutation(blocks * BLOCK, torch.int64)[:rows]
        rope = _pair(tensors, POSITIONS, model.head_dim // 2, dtype=torch.float32)
        norms = _pair(tensors, model.head_dim, dtype=DTYPES[dtype]) if qk_norm else None

        def run() -> tuple[Tensor, ...]:
            rotary_write_kv(qkv, cache, positions, slots, rope, norms, EPSILON)
            return qkv, cache

        def expected() -> tuple[Tensor, ...]:
            wide, kept = widened(qkv), widened(cache)
            wide_norms = None if norms is None else (norms[0].float(), norms[1].float())
            reference_rotary.rotary_write_kv(wide, kept, positions, slots, rope, wide_norms, EPSILON)
            return wide, kept

        return Operands(run, expected)

    return Problem(
        op="rotary and KV write",
        variant=f"kv {kv_dtype}" + (", norms" if qk_norm else ""),
        shape={"rows": rows, "heads": model.heads, "kv": model.kv_heads},
        dtype=dtype,
        bytes=rows * ((2 * rotated + model.kv_size) * size_of(dtype) + 2 * model.kv_size * size_of(kv_dtype)),
        flops=6 * rows * rotated,
        make=make,
    )


def _pair(tensors: TensorSource, *shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return tensors.normal(*shape, dtype=dtype), tensors.normal(*shape, dtype=dtype)


def silu_problem(model: LayerShape, rows: int, dtype: str) -> Problem:
    """SiLU(gate) * up."""

    def make(tensors: TensorSource) -> Operands:
        gate_up = tensors.normal(rows, 2 * model.intermediate, dtype=DTYPES[dtype])
        return Operands(lambda: (silu_mul(gate_up),), lambda: (reference_silu.silu_mul(gate_up.float()),))

    return Problem(
        op="silu mul",
        variant="gate up",
        shape={"rows": rows, "intermediate": model.intermediate},
        dtype=dtype,
        bytes=3 * rows * model.intermediate * size_of(dtype),
        flops=5 * rows * model.intermediate,
        make=make,
    )


def cutoff_problem(model: LayerShape, rows: int) -> Problem:
    """The lowest weight that top-k 50 and top-p 0.9 keep, of every row."""
    top_k, top_p = 50, 0.9

    def make(tensors: TensorSource) -> Operands:
        from loraplex.engine.kernels.triton.logit_masks import raise_cutoffs

        logits = tensors.normal(rows, model.vocab, dtype=torch.float32, scale=3.0)
        weights = (logits - logits.amax(1, keepdim=True)).exp_()
        lowest, index = torch.zeros_like(weights[:, :1]), tensors.permutation(rows, torch.int64)
        ks = torch.full((rows, 1), top_k, dtype=torch.int64, device=tensors.device)
        ps = torch.full((rows, 1), top_p, dtype=torch.float64, device=tensors.device)

        def run() -> tuple[Tensor, ...]:
            raise_cutoffs(weights, lowest, index, ks, ps)
            return (lowest,)

        def expected() -> tuple[Tensor, ...]:
            kept = weights.topk(top_k, dim=1).values.double()
            is_enough = kept.cumsum(1) >= top_p * kept.sum(1, keepdim=True)
            return (kept.gather(1, is_enough.int().argmax(1, keepdim=True)).float(),)

        return Operands(run, expected)

    return Problem(
        op="cutoff",
        variant="top-k, top-p",
        shape={"rows": rows, "vocab": model.vocab},
        dtype="float32",
        bytes=rows * model.vocab * 4,
        flops=rows * model.vocab,
        make=make,
    )


def bitmask_problem(model: LayerShape, rows: int, dtype: str) -> Problem:
    """Half of the tokens forbidden in every row: -inf in place of their logits."""
    words = -(-model.vocab // 32)

    def make(tensors: TensorSource) -> Operands:
        logits = tensors.normal(rows, model.vocab, dtype=DTYPES[dtype])
        bitmask = tensors.integers(-(1 << 31), 1 << 31, rows, words, dtype=torch.int32)
        masked = tensors.permutation(rows, torch.int64)

        def run() -> tuple[Tensor, ...]:
            apply_bitmask(logits, masked, bitmask)
            return (logits,)

        def expected() -> tuple[Tensor, ...]:
            wide = widened(logits)
            reference_bitmask.apply_bitmask(wide, masked, bitmask)
            return (wide,)

        return Operands(run, expected)

    return Problem(
        op="bitmask",
        variant="half",
        shape={"rows": rows, "vocab": model.vocab},
        dtype=dtype,
        bytes=rows * (words * 4 + model.vocab // 2 * size_of(dtype)),
        flops=rows * model.vocab,
        make=make,
    )
