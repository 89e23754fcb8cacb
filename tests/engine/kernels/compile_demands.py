"""What the machine code of each Triton kernel must be like on sm_90: a kernel without a demand here fails the compile rung.

Invariant: ceilings hold under every Triton version that the compile rung is run with; what is spilled is known by version.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton

from loraplex.engine.kernels.triton.attention_tile import TILE_BYTES
from loraplex.engine.kernels.triton.decode_attention import WIDE_HEAD

MAX_SHARED_BYTES = 227 << 10
"""What one block may have on sm_90."""
SHARED_BYTES_OF_TWO = 110 << 10
"""What one of two blocks of an SM may have."""

Constants = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Spills:
    """`stack`: bytes of registers that wait in memory for the main loop's end; `accesses`: loads and stores of them."""

    stack: int = 0
    accesses: int = 0


KNOWN_SPILLS = {
    ("3.6.0", 64): Spills(16, 8),
    ("3.6.0", 128): Spills(32, 14),
    ("3.7.1", 64): Spills(16, 8),
    ("3.7.1", 128): Spills(8, 2),
}
"""Of `decode_kernel` over pages of 8 bits, by Triton's version and the width of a head. No other kernel may spill."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a kernel's code must be like where its rows are 16 bits wide and its widths multiples of 16.

    `values` are the stored ones that one turn of its main loop takes, `most` the instructions a value may cost. An H200
    issues 15.6 for a bf16 value, 7.8 for one of 8 bits, 4.1 for one of 4 while its memory delivers one. `at_once`: all
    loads are on their way before any is waited for. `programs`: how many an SM must have room for. `spills`: the most there may be.
    """

    matrix: str | None = None
    load_bits: int = 32
    values: Callable[[Constants], int] | None = None
    most: float = 0.0
    at_once: bool = False
    most_shared: int = MAX_SHARED_BYTES
    programs: int = 1
    spills: Spills = Spills()


def _weights(c: Constants) -> int:
    return int(c["block_n"] * c["span"] * c["spans"])


def _keys_and_values(c: Constants) -> int:
    return int(2 * c["block_n"] * c["size"])


def _decode_demand(c: Constants) -> Demand:
    if c["size"] > WIDE_HEAD:
        return Demand("HMMA", 128, _keys_and_values, 8.0, programs=2)
    # 8 bits have twice as many keys in a tile as bf16.
    if c["block_n"] * c["block_d"] == TILE_BYTES:
        spills = KNOWN_SPILLS.get((triton.__version__, c["size"]), Spills())
        return Demand("HMMA", 128, _keys_and_values, 7.0, programs=3, spills=spills)
    return Demand("HMMA", 128, _keys_and_values, 8.0, programs=4)


def _skinny(c: Constants, dtype: str) -> Demand:
    """Zeros may cost 0.4 instructions. More rows, and groups of fewer inputs than a tile's, cost more."""
    most, shared = {8: 9.0, 4: 8.0}[c["bits"]], MAX_SHARED_BYTES
    if c["bits"] == 4 and c["has_zeros"] and c["block_m"] > 16:
        most = 10.5
    if dtype == "bfloat16" and c["block_m"] == 16 and c["span"] == 128 and c["groups_per_span"] <= 1:
        most = {(8, 32): 5.6, (8, 64): 4.7, (4, 32): 4.2, (4, 64): 3.4}[c["bits"], c["block_n"]]
        most += 0.4 * c["has_zeros"]
    if c["bits"] == 8:
        shared = SHARED_BYTES_OF_TWO
    return Demand("HMMA", 128, _weights, most, most_shared=shared)


def _wide(c: Constants) -> Demand:
    """128 rows wait for the tensor cores, not for memory: one program of 8 warps is enough."""
    is_small = c["bits"] == 8 and c["block_m"] == 64
    return Demand("HGMMA", 128, most_shared=SHARED_BYTES_OF_TWO if is_small else MAX_SHARED_BYTES)


def demand_of(kernel: str, constants: Constants, dtype: str) -> Demand:
    """Raises `KeyError` for a kernel without a demand: a new one must state its own."""
    if kernel == "skinny_kernel":
        return _skinny(constants, dtype)
    if kernel == "wide_kernel":
        return _wide(constants)
    if kernel == "decode_kernel":
        return _decode_demand(constants)
    return {
        "prefill_kernel": Demand("HMMA", 128, programs=2),
        "shrink_tile_kernel": Demand("HMMA", 128),
        "shrink_row_kernel": Demand(None, 128, lambda c: int(c["split_k"] * c["block_r"]), 7.0, True),
        "expand_tile_kernel": Demand("HMMA", 128),
        "expand_row_kernel": Demand(None, 128, lambda c: int(c["block_n"] * c["block_r"]), 6.0, True),
        "expand_silu_mul_kernel": Demand("HMMA", 128),
        "expand_rotary_kernel": Demand("HMMA", 128),
        "expand_rms_norm_kernel": Demand(None, 128),
        "embedding_kernel": Demand(),
        "order_kernel": Demand(),
        "chunk_kernel": Demand(),
        "cutoff_kernel": Demand(),
        "bitmask_kernel": Demand(),
        "rms_norm_kernel": Demand(None, 128),
        "rotary_kernel": Demand(None, 64),
        "silu_mul_kernel": Demand(None, 128),
        "round_rows_kernel": Demand(None, 128),
    }[kernel]
