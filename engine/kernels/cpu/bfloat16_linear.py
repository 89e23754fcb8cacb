"""y = x W^T + b in bfloat16: one kernel for every number of rows, over weights that are laid out once.

Invariant: a row's result is a function of the row and the weight alone; weights are read from memory in order.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from numba import carray, njit

from loraplex.engine.kernels.cpu.bfloat16_tile import (
    BIAS_NUMBERS,
    MAX_ROWS,
    OUTPUTS,
    STEP_INPUTS,
    multiply_tile,
)
from loraplex.engine.kernels.cpu.llvm_vectors import has_bfloat16_products
from loraplex.engine.kernels.cpu.numba_bridge import (
    LONG_PRODUCT,
    ParallelKernel,
    next_piece,
    team_size,
    thread_number,
    threads_for,
)

BLOCK_ROWS = 64
"""Rows of a piece of work: as many as the second-level cache keeps next to a tile of the weight."""


@dataclass(frozen=True, slots=True)
class BFloat16Weight:
    """A weight [outputs, inputs] and its bias in tiles of 32 outputs, see `bfloat16_tile.multiply_tile`.

    tiles: bfloat16 [tiles, numbers of a tile], the bias in pairs that make a float32. What is beyond `shape` is zero.
    """

    tiles: torch.Tensor
    shape: tuple[int, int]
    padded_inputs: int
    padded_outputs: int


def lay_out(weight: torch.Tensor, bias: torch.Tensor | None) -> BFloat16Weight:
    """Lay out a bfloat16 `weight` on a CPU, of any strides, and `bias` [outputs] of any float type or None."""
    outputs, inputs = weight.shape
    padded = F.pad(weight, (0, -inputs % STEP_INPUTS, 0, -outputs % OUTPUTS))
    tiles = weight.new_empty(len(padded) // OUTPUTS, BIAS_NUMBERS + OUTPUTS * padded.shape[1])
    added = torch.zeros(len(padded))
    if bias is not None:
        added[:outputs] = bias
    tiles[:, :BIAS_NUMBERS] = added.view(torch.bfloat16).view(-1, BIAS_NUMBERS)
    # [outputs, inputs] -> [tiles, pairs of inputs, 32, 2]
    pairs = padded.view(-1, OUTPUTS, padded.shape[1] // 2, 2).transpose(1, 2)
    tiles[:, BIAS_NUMBERS:].view(pairs.shape).copy_(pairs)
    return BFloat16Weight(tiles, (outputs, inputs), padded.shape[1], len(padded))


@cache
def _kernel(by_instruction: int) -> ParallelKernel:
    @njit(inline="always")  # type: ignore[untyped-decorator]
    def multiply(count: int, x: int, row_bytes: int, lines: int, steps: int, y: int, y_bytes: int) -> None:
        multiply_tile(count, by_instruction, x, row_bytes, lines, steps, y, y_bytes)

    def multiply_rows(block: Any) -> None:
        arguments = carray(block, (9,))
        rows, x, row_bytes, y, y_bytes = (
            arguments[0],
            arguments[1],
            arguments[2],
            arguments[3],
            arguments[4],
        )
        tiles, weights, tile_bytes, steps = arguments[5], arguments[6], arguments[7], arguments[8]
        counters = arguments.ctypes.data + 9 * 8
        threads, thread = team_size(), thread_number()
        pieces = tiles * ((rows + BLOCK_ROWS - 1) // BLOCK_ROWS)
        for turn in range(threads):
            owner = (thread + turn) % threads
            begin, end = pieces * owner // threads, pieces * (owner + 1) // threads
            piece = next_piece(counters, owner, begin, end)
            while piece >= 0:
                tile, first = piece % tiles, piece // tiles * BLOCK_ROWS
                count = min(rows - first, BLOCK_ROWS)
                lines = weights + tile * tile_bytes
                source, out = x + first * row_bytes, y + first * y_bytes + tile * OUTPUTS * 2
                for _ in range(count // MAX_ROWS):
                    multiply(MAX_ROWS, source, row_bytes, lines, steps, out, y_bytes)
                    source, out = source + MAX_ROWS * row_bytes, out + MAX_ROWS * y_bytes
                if count & 4:
                    multiply(4, source, row_bytes, lines, steps, out, y_bytes)
                    source, out = source + 4 * row_bytes, out + 4 * y_bytes
                if count & 2:
                    multiply(2, source, row_bytes, lines, steps, out, y_bytes)
                    source, out = source + 2 * row_bytes, out + 2 * y_bytes
                if count & 1:
                    multiply(1, source, row_bytes, lines, steps, out, y_bytes)
                piece = next_piece(counters, owner, begin, end)

    return ParallelKernel(multiply_rows, 9, as_written=True, shares_work=True)


def bfloat16_linear(
    x: torch.Tensor, weight: BFloat16Weight, by_instruction: bool | None = None
) -> torch.Tensor:
    """x [rows, inputs] contiguous, bfloat16 -> [rows, outputs], bfloat16. ValueError for any other input.

    `by_instruction`: whether to use the CPU's instruction for products of bfloat16; None: if it has one.
    """
    outputs, inputs = weight.shape
    rows, columns = x.shape
    if x.dtype is not torch.bfloat16 or columns != inputs or not x.is_contiguous():
        raise ValueError(f"x is {x.dtype} {list(x.shape)}; contiguous rows of {inputs} bfloat16 are needed")
    if weight.padded_inputs != inputs:
        x = F.pad(x, (0, weight.padded_inputs - inputs))
    y = x.new_empty(rows, weight.padded_outputs)
    if by_instruction is None:
        by_instruction = has_bfloat16_products()
    tiles, numbers = weight.tiles.shape
    _kernel(int(by_instruction))(
        threads_for(tiles * numbers),
        rows,
        x.data_ptr(),
        weight.padded_inputs * 2,
        y.data_ptr(),
        weight.padded_outputs * 2,
        tiles,
        weight.tiles.data_ptr(),
        numbers * 2,
        weight.padded_inputs // STEP_INPUTS,
        releases_gil=rows * inputs * outputs >= LONG_PRODUCT,
    )
    return y if weight.padded_outputs == outputs else y[:, :outputs].contiguous()
