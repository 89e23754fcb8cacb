"""SGMV (Punica, Chen et al. 2023) for small groups: shrink, barrier, expand, in one parallel region.

A's and B's bytes are read once, in order, by one thread each. Every sum runs in a fixed order, whatever the batch.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from loraplex.engine.kernels.cpu.numba_bridge import (
    KINDS,
    ParallelKernel,
    barrier,
    load,
    load_constant,
    load_float,
    load_int,
    load_long,
    store,
    store_float,
    team_size,
    thread_number,
    width,
)
from loraplex.engine.lora.batch import GROUP_ROWS, LoraGroups
from loraplex.engine.lora.page_geometry import MAX_RANK
from loraplex.engine.lora.site import A_PAGES, RANK, LoraSite


@njit(inline="always")  # type: ignore[untyped-decorator]
def _dot(kind: int, weights: int, row: int, size: int) -> Any:
    total = np.float32(0)
    for k in range(size):
        total += load_constant(kind, weights, k) * load_float(row, k)
    return total


@njit(inline="always")  # type: ignore[untyped-decorator]
def _dots_of_4(kind: int, weights: int, row: int, size: int, out: int, stride: int) -> None:
    """Compute four rows at once: each weight is loaded and widened once for all of them."""
    t0, t1, t2, t3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    step = size * 4
    for k in range(size):
        w = load_constant(kind, weights, k)
        t0 += w * load_float(row, k)
        t1 += w * load_float(row + step, k)
        t2 += w * load_float(row + 2 * step, k)
        t3 += w * load_float(row + 3 * step, k)
    store_float(out, 0, t0)
    store_float(out, stride, t1)
    store_float(out, 2 * stride, t2)
    store_float(out, 3 * stride, t3)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _dots_of_2(kind: int, weights: int, row: int, size: int, out: int, stride: int) -> None:
    t0, t1 = np.float32(0), np.float32(0)
    for k in range(size):
        w = load_constant(kind, weights, k)
        t0 += w * load_float(row, k)
        t1 += w * load_float(row + size * 4, k)
    store_float(out, 0, t0)
    store_float(out, stride, t1)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _add_4_ranks(kind: int, sums: int, b: int, stride: int, h: int, n0: int, n1: int) -> None:
    b1, b2, b3 = b + stride, b + 2 * stride, b + 3 * stride
    h0, h1, h2, h3 = load_float(h, 0), load_float(h, 1), load_float(h, 2), load_float(h, 3)
    for n in range(n0, n1):
        value = load_float(sums, n) + h0 * load_constant(kind, b, n) + h1 * load_constant(kind, b1, n)
        store_float(sums, n, value + (h2 * load_constant(kind, b2, n) + h3 * load_constant(kind, b3, n)))


@njit(inline="always")  # type: ignore[untyped-decorator]
def _add_4_ranks_to_2(
    kind: int, sums: int, next_sums: int, b: int, stride: int, h: int, g: int, n0: int, n1: int
) -> None:
    """The same sums as `_add_4_ranks`, for two rows."""
    b1, b2, b3 = b + stride, b + 2 * stride, b + 3 * stride
    h0, h1, h2, h3 = load_float(h, 0), load_float(h, 1), load_float(h, 2), load_float(h, 3)
    g0, g1, g2, g3 = load_float(g, 0), load_float(g, 1), load_float(g, 2), load_float(g, 3)
    for n in range(n0, n1):
        w0, w1, w2, w3 = (
            load_constant(kind, b, n),
            load_constant(kind, b1, n),
            load_constant(kind, b2, n),
            load_constant(kind, b3, n),
        )
        store_float(sums, n, load_float(sums, n) + h0 * w0 + h1 * w1 + (h2 * w2 + h3 * w3))
        store_float(next_sums, n, load_float(next_sums, n) + g0 * w0 + g1 * w1 + (g2 * w2 + g3 * w3))


@njit(inline="always")  # type: ignore[untyped-decorator]
def _add_rank(kind: int, sums: int, b: int, h: int, n0: int, n1: int) -> None:
    h0 = load_float(h, 0)
    for n in range(n0, n1):
        store_float(sums, n, load_float(sums, n) + h0 * load_constant(kind, b, n))


@njit(inline="always")  # type: ignore[untyped-decorator]
def _expand_rows(
    kind: int,
    count: int,
    sums: int,
    width_out: int,
    b: int,
    size: int,
    rank: int,
    h: int,
    stride: int,
    n0: int,
    n1: int,
) -> None:
    """Add B's rows to the sums [count, width_out] of one group, four ranks and up to two rows at a time."""
    row_bytes = size * width(kind)
    for r in range(rank // 4):
        rows = b + 4 * r * row_bytes
        for j in range(count // 2):
            target, factors = sums + 2 * j * width_out * 4, h + (2 * j * stride + 4 * r) * 4
            _add_4_ranks_to_2(
                kind, target, target + width_out * 4, rows, row_bytes, factors, factors + stride * 4, n0, n1
            )
        if count % 2:
            target, factors = sums + (count - 1) * width_out * 4, h + ((count - 1) * stride + 4 * r) * 4
            _add_4_ranks(kind, target, rows, row_bytes, factors, n0, n1)
    for r in range(rank // 4 * 4, rank):
        for j in range(count):
            _add_rank(kind, sums + j * width_out * 4, b + r * row_bytes, h + (j * stride + r) * 4, n0, n1)


@cache
def _kernel(kind: int) -> ParallelKernel:
    def shrink_expand(block: Any) -> None:
        arguments = carray(block, (18,))
        threads, tokens, inputs = np.int64(team_size()), arguments[0], arguments[1]
        outputs, groups = arguments[2], arguments[3]
        x, y, order, starts, slots = arguments[4], arguments[5], arguments[6], arguments[7], arguments[8]
        table, slices, offsets = arguments[9], arguments[10], arguments[11]
        widened, hidden, hidden_columns, sums = arguments[12], arguments[13], arguments[14], arguments[15]
        entry_size = arguments[17]
        pages = (entry_size - A_PAGES) // 2
        thread = np.int64(thread_number())

        for j in range(thread, tokens, threads):
            source = x + np.int64(load_int(order, j)) * inputs * width(kind)
            for k in range(inputs):
                store_float(widened + j * inputs * 4, k, load(kind, source, k))
        barrier()

        total = np.int64(0)
        for g in range(groups):
            entry = table + np.int64(load_int(slots, g)) * slices * entry_size * 8
            for s in range(slices):
                total += load_long(entry, s * entry_size + RANK)
        low, high = total * thread // threads, total * (thread + 1) // threads
        passed = np.int64(0)
        for g in range(groups):
            entry = table + np.int64(load_int(slots, g)) * slices * entry_size * 8
            begin = np.int64(load_int(starts, g))
            count = np.int64(load_int(starts, g + 1)) - begin
            column = np.int64(0)
            for s in range(slices):
                a, rank = load_long(entry, s * entry_size + A_PAGES), load_long(entry, s * entry_size + RANK)
                for r in range(max(np.int64(0), low - passed), min(rank, high - passed)):
                    weights = a + r * inputs * width(kind)
                    row = widened + begin * inputs * 4
                    out = hidden + (begin * hidden_columns + column + r) * 4
                    for j in range(count // 4):
                        rows, outs = row + 4 * j * inputs * 4, out + 4 * j * hidden_columns * 4
                        _dots_of_4(kind, weights, rows, inputs, outs, hidden_columns)
                    paired = count // 4 * 4
                    if count - paired >= 2:
                        rows, outs = row + paired * inputs * 4, out + paired * hidden_columns * 4
                        _dots_of_2(kind, weights, rows, inputs, outs, hidden_columns)
                    if count % 2:
                        last = count - 1
                        dot = _dot(kind, weights, row + last * inputs * 4, inputs)
                        store_float(out, last * hidden_columns, dot)
                column += rank
                passed += rank
        barrier()

        # Whole groups per thread when there are enough of them, else a share of the columns of every group.
        by_group = groups >= 2 * threads
        first_group = groups * thread // threads if by_group else np.int64(0)
        last_group = groups * (thread + 1) // threads if by_group else groups
        accumulators = sums + thread * arguments[16] * outputs * 4
        for g in range(first_group, last_group):
            entry = table + np.int64(load_int(slots, g)) * slices * entry_size * 8
            begin = np.int64(load_int(starts, g))
            count = np.int64(load_int(starts, g + 1)) - begin
            column = np.int64(0)
            for s in range(slices):
                b = load_long(entry, s * entry_size + A_PAGES + pages)
                rank = load_long(entry, s * entry_size + RANK)
                if rank == 0:
                    continue
                offset = load_long(offsets, s)
                size = load_long(offsets, s + 1) - offset
                n0 = np.int64(0) if by_group else size * thread // threads // 32 * 32
                n1 = size if by_group or thread + 1 == threads else size * (thread + 1) // threads // 32 * 32
                for j in range(count):
                    source = y + (np.int64(load_int(order, begin + j)) * outputs + offset) * width(kind)
                    for n in range(n0, n1):
                        store_float(accumulators + j * size * 4, n, load(kind, source, n))
                h = hidden + (begin * hidden_columns + column) * 4
                _expand_rows(kind, count, accumulators, size, b, size, rank, h, hidden_columns, n0, n1)
                for j in range(count):
                    target = y + (np.int64(load_int(order, begin + j)) * outputs + offset) * width(kind)
                    for n in range(n0, n1):
                        store(kind, target, n, load_float(accumulators + j * size * 4, n))
                column += rank

    return ParallelKernel(shrink_expand, 18)


class Workspace:
    """Buffers of the parallel region, grown as needed and reused over all sites of a step.

    Their content is valid for one region. The caller that reserved them keeps a reference, so another engine's thread may
    grow them meanwhile.
    """

    def __init__(self) -> None:
        self._widened = torch.empty(0)
        self._hidden = torch.empty(0)
        self._sums = torch.empty(0)

    def reserve(
        self, rows: int, site: LoraSite, threads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """At least x widened [rows, inputs], hidden [rows, slices * MAX_RANK] and sums [threads, GROUP_ROWS, outputs]."""
        widened = self._widened = _grown(self._widened, rows * site.inputs)
        hidden = self._hidden = _grown(self._hidden, rows * len(site.names) * MAX_RANK)
        sums = self._sums = _grown(self._sums, threads * GROUP_ROWS * site.outputs)
        return widened, hidden, sums


def _grown(buffer: torch.Tensor, elements: int) -> torch.Tensor:
    return buffer if buffer.numel() >= elements else torch.empty(elements)


@cache
def _workspace() -> Workspace:
    return Workspace()


def sgmv(x: torch.Tensor, y: torch.Tensor, site: LoraSite, groups: LoraGroups) -> None:
    """See `reference.sgmv`. Groups hold at most `GROUP_ROWS` rows."""
    threads = torch.get_num_threads()
    widened, hidden, sums = _workspace().reserve(groups.num_rows, site, threads)
    _kernel(KINDS[x.dtype])(
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
        widened.data_ptr(),
        hidden.data_ptr(),
        len(site.names) * MAX_RANK,
        sums.data_ptr(),
        GROUP_ROWS,
        site.table.shape[2],
    )
