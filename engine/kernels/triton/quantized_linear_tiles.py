"""Divides a product with a quantized weight into programs: tiles of y, spans of K, and splits of K where tiles are few.

Invariant: the division depends on the weight's shape and the number of rows, never on what the rows contain.
"""

from dataclasses import dataclass

import torch

from loraplex.engine.quantization.groups import span_of
from loraplex.engine.quantization.quantized_weight import QuantizedWeight, WeightFormat

INT8_SPAN = 128
"""Inputs of a tile of int8: a line of 128 bytes of an output; a group when groups are shorter."""
_SMS = 132
"""Streaming multiprocessors of an H200."""
_WARPS_OF_SM = 8
"""With at least this many warps an SM waits for memory and not for instructions."""
MAX_SPLITS = 4
_MIN_SPLIT_INPUTS = 1024
_WORTH_A_SPLIT = 0.75
"""Largest share of the unsplit product's time that a split product may need: programs that wait for each other take 1 to 2
us."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How one program divides the product. One warp each computes `spans` tiles of K in parallel; they are summed at the
    end.
    """

    block_m: int
    block_n: int
    spans: int
    num_warps: int
    num_stages: int


SKINNY_TILES = {
    4: (Tile(16, 32, 8, 8, 3), Tile(16, 64, 4, 4, 4), Tile(32, 32, 8, 8, 2)),
    8: (Tile(16, 32, 8, 8, 2), Tile(16, 64, 4, 4, 3), Tile(32, 32, 8, 8, 2)),
}
"""By bits of a weight. Up to 32 rows, on HMMA: the warps share K, because 4096 outputs alone are too few for 132 SMs.

A stage of int8 holds twice the bytes: with one less, an SM has shared memory for two programs.
"""
WIDE_TILES = (Tile(64, 64, 1, 4, 4), Tile(128, 128, 1, 8, 3))
"""Prefill, on wgmma with both operands in shared memory."""
FLOAT32_TILE = Tile(16, 32, 4, 4, 1)
"""For exact float32: without tensor cores there are no registers for loads that run ahead."""
_MANY_OUTPUTS = 64 * _SMS * 2
"""From this many outputs on, a tile of 64 leaves every SM two programs."""


def tile_for(x: torch.Tensor, weight: QuantizedWeight) -> Tile:
    """The tile of a product: by its rows, and for decode by whether the outputs fill the device."""
    rows = x.shape[0]
    few, many, more_rows = SKINNY_TILES[weight.bits]
    wide, wider = WIDE_TILES
    if x.dtype is torch.float32:
        return FLOAT32_TILE
    if rows <= few.block_m:
        return many if weight.outputs >= _MANY_OUTPUTS else few
    if rows <= more_rows.block_m:
        return more_rows
    fills_device = _ceiling(rows, wider.block_m) * _ceiling(weight.outputs, wider.block_n) >= _SMS
    return wider if rows > wide.block_m and fills_device else wide


def splits_for(rows: int, weight: QuantizedWeight, tile: Tile) -> int:
    """Return the programs that share one tile of y: by the weight's shape, where its outputs leave SMs with few warps."""
    if rows > tile.block_m or tile == FLOAT32_TILE:
        return 1
    programs = _ceiling(weight.outputs, tile.block_n)
    at_once = _SMS * _WARPS_OF_SM // tile.num_warps

    def time(splits: int) -> float:
        return _ceiling(programs * splits, at_once) / splits

    allowed = [n for n in range(1, MAX_SPLITS + 1) if n == 1 or weight.inputs >= n * _MIN_SPLIT_INPUTS]
    best = min(allowed, key=time)
    return best if time(best) <= _WORTH_A_SPLIT * time(1) else 1


def span_for(weight: QuantizedWeight) -> int:
    """Inputs of a tile of K."""
    if weight.format is WeightFormat.INT4:
        return span_of(weight.group_size)
    return INT8_SPAN if weight.is_per_channel else min(INT8_SPAN, weight.group_size)


def _ceiling(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
