"""Applies the bitmask of a grammar, 32 tokens at a time, with words split over threads. A word of ones costs nothing."""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray

from loraplex.engine.kernels.cpu.numba_bridge import (
    KINDS,
    ParallelKernel,
    load,
    load_int,
    load_long,
    store,
    team_size,
    thread_number,
    threads_for,
    width,
)

FORBIDDEN = np.float32(-np.inf)


@cache
def _kernel(kind: int) -> ParallelKernel:
    def forbid(block: Any) -> None:
        arguments = carray(block, (6,))
        threads, masked, words, vocab = np.int64(team_size()), arguments[0], arguments[1], arguments[2]
        logits, rows, bitmask = arguments[3], arguments[4], arguments[5]
        share = (masked * words + threads - 1) // threads
        begin = np.int64(thread_number()) * share
        for index in range(begin, min(begin + share, masked * words)):
            word = load_int(bitmask, index)
            if word == -1:
                continue
            token = index % words * 32
            target = logits + (load_long(rows, index // words) * vocab + token) * width(kind)
            if token + 32 <= vocab:
                for bit in range(32):
                    value = load(kind, target, bit)
                    store(kind, target, bit, value if (word >> np.int32(bit)) & 1 else FORBIDDEN)
            else:
                for bit in range(vocab - token):
                    value = load(kind, target, bit)
                    store(kind, target, bit, value if (word >> np.int32(bit)) & 1 else FORBIDDEN)

    return ParallelKernel(forbid, 6)


def apply_bitmask(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """See `reference.apply_bitmask`."""
    masked, words = bitmask.shape
    vocab = logits.shape[1]
    _kernel(KINDS[logits.dtype])(
        threads_for(masked * vocab),
        masked,
        words,
        vocab,
        logits.data_ptr(),
        rows.data_ptr(),
        bitmask.data_ptr(),
    )
