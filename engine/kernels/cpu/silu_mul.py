"""SiLU(gate) * up of a gated MLP (Shazeer 2020), rows split over threads."""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray

from loraplex.engine.kernels.cpu.numba_bridge import (
    KINDS,
    ParallelKernel,
    exp,
    load_constant,
    store,
    team_size,
    thread_number,
    threads_for,
    width,
)


@cache
def _kernel(kind: int) -> ParallelKernel:
    def silu_mul_rows(block: Any) -> None:
        arguments = carray(block, (4,))
        threads, rows, size = np.int64(team_size()), arguments[0], arguments[1]
        for row in range(np.int64(thread_number()), rows, threads):
            gate = arguments[2] + row * 2 * size * width(kind)
            up = gate + size * width(kind)
            out = arguments[3] + row * size * width(kind)
            for i in range(size):
                g = load_constant(kind, gate, i)
                # sigmoid(g) without overflow: with e = exp(-|g|), 1 / (1 + e) for g >= 0 and e / (1 + e) below
                e = exp(-abs(g))
                numerator = np.float32(1) if g >= np.float32(0) else e
                store(kind, out, i, g * numerator / (np.float32(1) + e) * load_constant(kind, up, i))

    return ParallelKernel(silu_mul_rows, 4)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `reference.silu_mul`."""
    rows, doubled = gate_up.shape
    out = gate_up.new_empty(rows, doubled // 2)
    elements = rows * doubled
    _kernel(KINDS[gate_up.dtype])(
        threads_for(elements), rows, doubled // 2, gate_up.data_ptr(), out.data_ptr()
    )
    return out
