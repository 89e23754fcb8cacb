"""y = x W^T + b with W in 8 or 4 bits and rows rounded to int8 in groups of 32: round, barrier, multiply.

Invariant: a row's result is a function of the row and the weight alone; weights are read from memory once, in order.
"""

import threading
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray, njit

from loraplex.engine.kernels.cpu.integer_tile import BLOCK_BYTES, GROUP, multiply_tile, round_group
from loraplex.engine.kernels.cpu.integer_weight import IntegerWeight
from loraplex.engine.kernels.cpu.llvm_vectors import LANES, has_byte_products
from loraplex.engine.kernels.cpu.numba_bridge import (
    LONG_PRODUCT,
    ParallelKernel,
    barrier,
    next_piece,
    team_size,
    thread_number,
    threads_for,
)

DTYPES = (torch.bfloat16, torch.float16)
PIECE_TILES = 4
"""Tiles of a piece of work at one row; with more rows fewer, so that taking a piece stays cheap next to its work."""
BLOCK_ROWS = 64
"""Rows of a piece of work: as many as the second-level cache keeps next to a tile of the weight."""


@cache
def _kernel(is_bfloat16: int, has_nibbles: int, has_zeros: int, by_instruction: int) -> ParallelKernel:
    @njit(inline="always")  # type: ignore[untyped-decorator]
    def multiply(
        count: int,
        blocks: int,
        row_bytes: int,
        lines: int,
        tile_bytes: int,
        weight_groups: int,
        groups: int,
        y: int,
        y_bytes: int,
    ) -> None:
        multiply_tile(
            count,
            is_bfloat16,
            has_nibbles,
            has_zeros,
            by_instruction,
            blocks,
            row_bytes,
            lines,
            tile_bytes,
            weight_groups,
            groups,
            y,
            y_bytes,
        )

    def round_multiply(block: Any) -> None:
        arguments = carray(block, (11,))
        threads, rows, x, blocks, y, y_bytes = (
            np.int64(team_size()),
            arguments[0],
            arguments[1],
            arguments[2],
            arguments[3],
            arguments[4],
        )
        tiles, weights, tile_bytes = arguments[5], arguments[6], arguments[7]
        weight_groups, groups, excess = arguments[8], arguments[9], arguments[10]
        thread = np.int64(thread_number())

        row_groups = weight_groups * groups
        for index in range(
            rows * row_groups * thread // threads, rows * row_groups * (thread + 1) // threads
        ):
            round_group(is_bfloat16, x + index * GROUP * 2, excess, blocks + index * BLOCK_BYTES)
        barrier()

        row_bytes, counters = row_groups * BLOCK_BYTES, arguments.ctypes.data + 11 * 8
        run = max(1, PIECE_TILES // max(rows, 1))
        runs = (tiles + run - 1) // run
        pieces = runs * ((rows + BLOCK_ROWS - 1) // BLOCK_ROWS)
        for turn in range(threads):
            owner = (thread + turn) % threads
            begin, end = pieces * owner // threads, pieces * (owner + 1) // threads
            piece = next_piece(counters, owner, begin, end)
            while piece >= 0:
                row = piece // runs * BLOCK_ROWS
                count, row_blocks = min(rows - row, BLOCK_ROWS), blocks + row * row_bytes
                first_tile = piece % runs * run
                for tile in range(first_tile, min(first_tile + run, tiles)):
                    lines, first = weights + tile * tile_bytes, row_blocks
                    out = y + row * y_bytes + tile * LANES * 2
                    for _ in range(count // 8):
                        multiply(8, first, row_bytes, lines, tile_bytes, weight_groups, groups, out, y_bytes)
                        first, out = first + 8 * row_bytes, out + 8 * y_bytes
                    if count & 4:
                        multiply(4, first, row_bytes, lines, tile_bytes, weight_groups, groups, out, y_bytes)
                        first, out = first + 4 * row_bytes, out + 4 * y_bytes
                    if count & 2:
                        multiply(2, first, row_bytes, lines, tile_bytes, weight_groups, groups, out, y_bytes)
                        first, out = first + 2 * row_bytes, out + 2 * y_bytes
                    if count & 1:
                        multiply(1, first, row_bytes, lines, tile_bytes, weight_groups, groups, out, y_bytes)
                piece = next_piece(counters, owner, begin, end)

    return ParallelKernel(round_multiply, 11, as_written=True, shares_work=True)


class Workspace(threading.local):
    """The buffer for a calling thread's rows, grown as needed. Its content is valid for one parallel region."""

    def __init__(self) -> None:
        self._blocks = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int) -> torch.Tensor:
        """Return at least `size` bytes."""
        if self._blocks.numel() < size:
            self._blocks = torch.empty(size, dtype=torch.uint8)
        return self._blocks


@cache
def _workspace() -> Workspace:
    return Workspace()


def integer_linear(
    x: torch.Tensor, weight: IntegerWeight, by_instruction: bool | None = None
) -> torch.Tensor:
    """x [rows, inputs] contiguous, bfloat16 or float16 -> [rows, outputs] of the same type. ValueError for any other input.

    `by_instruction`: whether to use the CPU's instruction for products of bytes; None: if it has one. Both are exact.
    """
    if x.dtype not in DTYPES or x.shape[1] != weight.inputs:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}; rows of {weight.inputs} 16-bit floats are needed")
    rows, groups = x.shape[0], weight.group_size // GROUP
    if weight.padded_inputs != weight.inputs:
        x = F.pad(x, (0, weight.padded_inputs - weight.inputs))
    y = x.new_empty(rows, weight.padded_outputs)
    blocks = _workspace().reserve(rows * weight.padded_inputs // GROUP * BLOCK_BYTES)
    if by_instruction is None:
        by_instruction = has_byte_products()
    _kernel(
        int(x.dtype is torch.bfloat16), int(weight.has_nibbles), int(weight.has_zeros), int(by_instruction)
    )(
        threads_for(weight.tiles.numel()),
        rows,
        x.data_ptr(),
        blocks.data_ptr(),
        y.data_ptr(),
        weight.padded_outputs * 2,
        weight.tiles.shape[0],
        weight.tiles.data_ptr(),
        weight.tiles.shape[1],
        weight.weight_groups,
        groups,
        weight.excess,
        releases_gil=rows * weight.inputs * weight.outputs >= LONG_PRODUCT,
    )
    return y if weight.padded_outputs == weight.outputs else y[:, : weight.outputs].contiguous()
