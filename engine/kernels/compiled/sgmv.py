"""SGMV (Punica, Chen et al. 2023) for small groups: shrink, barrier, expand, in one parallel region.

A's and B's bytes are read once, in order, by one thread each; every sum runs in a fixed order, whoever shares the batch.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray

from loraplex.engine.kernels.compiled.machine import (
    KINDS,
    ParallelBody,
    barrier,
    load,
    load_float,
    load_int,
    load_long,
    store,
    store_float,
    thread_number,
    width,
)
from loraplex.engine.lora.batch import LoraGroups
from loraplex.engine.lora.site import MAX_RANK, LoraSite


@cache
def _body(kind: int) -> ParallelBody:
    def shrink_expand(block: Any) -> None:
        arguments = carray(block, (17,))
        threads, tokens, inputs, outputs, groups = (
            arguments[0],
            arguments[1],
            arguments[2],
            arguments[3],
            arguments[4],
        )
        x, y, order, starts, slots = (arguments[5], arguments[6], arguments[7], arguments[8], arguments[9])
        table, slices, offsets = arguments[10], arguments[11], arguments[12]
        widened, hidden, hidden_columns, sums = arguments[13], arguments[14], arguments[15], arguments[16]
        thread = np.int64(thread_number())

        for j in range(thread, tokens, threads):
            source = x + np.int64(load_int(order, j)) * inputs * width(kind)
            for k in range(inputs):
                store_float(widened + j * inputs * 4, k, load(kind, source, k))
        barrier()

        total = np.int64(0)
        for g in range(groups):
            entry = table + np.int64(load_int(slots, g)) * slices * 24
            for s in range(slices):
                total += load_long(entry, 3 * s + 2)
        low, high = total * thread // threads, total * (thread + 1) // threads
        passed = np.int64(0)
        for g in range(groups):
            entry = table + np.int64(load_int(slots, g)) * slices * 24
            begin, end = np.int64(load_int(starts, g)), np.int64(load_int(starts, g + 1))
            column = np.int64(0)
            for s in range(slices):
                a, rank = load_long(entry, 3 * s), load_long(entry, 3 * s + 2)
                for r in range(max(np.int64(0), low - passed), min(rank, high - passed)):
                    weights = a + r * inputs * width(kind)
                    for j in range(begin, end):
                        row = widened + j * inputs * 4
                        dot = np.float32(0)
                        for k in range(inputs):
                            dot += load(kind, weights, k) * load_float(row, k)
                        store_float(hidden, j * hidden_columns + column + r, dot)
                column += rank
                passed += rank
        barrier()

        # Whole groups per thread when there are enough of them, else a share of the columns of every group.
        by_group = groups >= 2 * threads
        first_group = groups * thread // threads if by_group else np.int64(0)
        last_group = groups * (thread + 1) // threads if by_group else groups
        accumulators = sums + thread * outputs * 4
        for g in range(first_group, last_group):
            entry = table + np.int64(load_int(slots, g)) * slices * 24
            column = np.int64(0)
            for s in range(slices):
                b, rank = load_long(entry, 3 * s + 1), load_long(entry, 3 * s + 2)
                offset = load_long(offsets, s)
                size = load_long(offsets, s + 1) - offset
                n0 = np.int64(0) if by_group else size * thread // threads // 32 * 32
                n1 = size if by_group or thread + 1 == threads else size * (thread + 1) // threads // 32 * 32
                for j in range(np.int64(load_int(starts, g)), np.int64(load_int(starts, g + 1))):
                    if rank == 0:
                        continue
                    target = y + (np.int64(load_int(order, j)) * outputs + offset) * width(kind)
                    factors = hidden + (j * hidden_columns + column) * 4
                    for n in range(n0, n1):
                        store_float(accumulators, n, load(kind, target, n))
                    for r in range(rank // 4):
                        b0 = b + 4 * r * size * width(kind)
                        b1, b2 = b0 + size * width(kind), b0 + 2 * size * width(kind)
                        b3 = b2 + size * width(kind)
                        h0, h1 = load_float(factors, 4 * r), load_float(factors, 4 * r + 1)
                        h2, h3 = load_float(factors, 4 * r + 2), load_float(factors, 4 * r + 3)
                        for n in range(n0, n1):
                            value = (
                                load_float(accumulators, n) + h0 * load(kind, b0, n) + h1 * load(kind, b1, n)
                            )
                            value += h2 * load(kind, b2, n) + h3 * load(kind, b3, n)
                            store_float(accumulators, n, value)
                    for r in range(rank // 4 * 4, rank):
                        b0 = b + r * size * width(kind)
                        h0 = load_float(factors, r)
                        for n in range(n0, n1):
                            store_float(accumulators, n, load_float(accumulators, n) + h0 * load(kind, b0, n))
                    for n in range(n0, n1):
                        store(kind, target, n, load_float(accumulators, n))
                column += rank

    return ParallelBody(shrink_expand, 17)


class Workspace:
    """Buffers of the parallel region, grown as needed and reused over all sites of a step."""

    def __init__(self) -> None:
        self._widened = torch.empty(0)
        self._hidden = torch.empty(0)
        self._sums = torch.empty(0)

    def reserve(self, rows: int, site: LoraSite, threads: int) -> tuple[int, int, int]:
        """Addresses of x widened [rows, inputs], hidden [rows, slices * MAX_RANK] and sums [threads, outputs]."""
        self._widened = _grown(self._widened, rows * site.inputs)
        self._hidden = _grown(self._hidden, rows * len(site.names) * MAX_RANK)
        self._sums = _grown(self._sums, threads * site.outputs)
        return self._widened.data_ptr(), self._hidden.data_ptr(), self._sums.data_ptr()


def _grown(buffer: torch.Tensor, elements: int) -> torch.Tensor:
    return buffer if buffer.numel() >= elements else torch.empty(elements)


@cache
def _workspace() -> Workspace:
    return Workspace()


def sgmv(x: torch.Tensor, y: torch.Tensor, site: LoraSite, groups: LoraGroups) -> None:
    """See `reference.sgmv`."""
    threads = torch.get_num_threads()
    widened, hidden, sums = _workspace().reserve(groups.num_rows, site, threads)
    _body(KINDS[x.dtype])(
        threads,
        groups.num_rows,
        site.inputs,
        site.outputs,
        len(groups.host_slots),
        x.data_ptr(),
        y.data_ptr(),
        groups.order.data_ptr(),
        groups.starts.data_ptr(),
        groups.slots.data_ptr(),
        site.table.data_ptr(),
        len(site.names),
        site.offsets.data_ptr(),
        widened,
        hidden,
        len(site.names) * MAX_RANK,
        sums,
    )
