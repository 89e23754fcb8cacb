"""RMSNorm (Zhang & Sennrich 2019) with the residual added before it, rows split over threads."""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray

from loraplex.engine.kernels.cpu.numba_bridge import (
    KINDS,
    ParallelKernel,
    load,
    store,
    team_size,
    thread_number,
    threads_for,
    width,
)


@cache
def _kernel(kind: int) -> ParallelKernel:
    def rms_norm_rows(block: Any) -> None:
        arguments = carray(block, (8,))
        threads, rows, size = np.int64(team_size()), arguments[0], arguments[1]
        x, residual, weight, out = arguments[2], arguments[3], arguments[4], arguments[5]
        add = arguments[6] != 0
        epsilon = np.float32(arguments[7]) * np.float32(1e-12)
        for row in range(np.int64(thread_number()), rows, threads):
            offset = row * size * width(kind)
            total = np.float32(0)
            if add:
                for i in range(size):
                    value = load(kind, x + offset, i) + load(kind, residual + offset, i)
                    store(kind, residual + offset, i, value)
                source = residual + offset
            else:
                source = x + offset
            for i in range(size):
                value = load(kind, source, i)
                total += value * value
            scale = np.float32(1) / np.sqrt(total / np.float32(size) + epsilon)
            for i in range(size):
                store(kind, out + offset, i, load(kind, source, i) * scale * load(kind, weight, i))

    return ParallelKernel(rms_norm_rows, 8)


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """See `reference.rms_norm`. `epsilon` travels as a multiple of 1e-12."""
    out = torch.empty_like(x)
    rows, size = x.shape
    _kernel(KINDS[x.dtype])(
        threads_for(rows * size),
        rows,
        size,
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        residual is not None,
        round(epsilon * 1e12),
    )
    return out
