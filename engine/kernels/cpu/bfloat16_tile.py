"""The inner step of a bfloat16 product as LLVM code: some rows times 32 outputs.

Invariant: an output is one float32 sum, begun with the bias, over the inputs in order, whatever the number of rows.
"""

from typing import Any

from numba import types
from numba.core import cgutils
from numba.core.typing import Signature
from numba.extending import intrinsic

from loraplex.engine.kernels.cpu import llvm_vectors as code
from loraplex.engine.kernels.cpu.llvm_vectors import FLOATS, I32, I64, INTS, LANES
from loraplex.engine.kernels.cpu.numba_bridge import Codegen

VECTORS = 2
"""Of 16 outputs: sums of one alone would wait for one another."""
OUTPUTS = VECTORS * LANES
VECTOR_BYTES = 64
LINE_BYTES = VECTORS * VECTOR_BYTES
"""Layout of a line: two inputs of output 0, two of output 1, and so on."""
BIAS_NUMBERS = LINE_BYTES // 2
"""A tile begins with a line of float32, the bias."""
STEP_LINES = 4
STEP_INPUTS = 2 * STEP_LINES
"""Inputs of one turn of the loop; padded inputs are a multiple."""
MAX_ROWS = 8
"""Rows of a tile at once: 16 sums, which leaves registers for weights and a row."""
_FEW_ROWS, _AHEAD_BYTES_FEW, _AHEAD_BYTES = 2, 4096, 8192
"""How far ahead of their use weights are prefetched, into the next tile too: that is mostly the thread's own."""


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply_tile(
    typing_context: Any,
    rows: Any,
    by_instruction: Any,
    x: Any,
    row_bytes: Any,
    lines: Any,
    steps: Any,
    out: Any,
    out_bytes: Any,
) -> tuple[Signature, Codegen]:
    """`rows` rows times 32 outputs, rounded once to `out`; the first two arguments are constants.

    x: the first row, `row_bytes` before the next. lines: the bias, then `steps` times four lines.
    """
    constants = (rows, by_instruction)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tile = _Tile(builder, rows.literal_value, bool(by_instruction.literal_value))
        tile.emit(*arguments[len(constants) :])
        return context.get_dummy_value()

    return types.void(*constants, *[types.int64] * 6), codegen


class _Tile:
    """Emits the code of one tile: weights are loaded once for all its rows."""

    def __init__(self, builder: Any, rows: int, by_instruction: bool) -> None:
        self._builder, self._by_instruction = builder, by_instruction
        self._ahead = I64(_AHEAD_BYTES_FEW if rows <= _FEW_ROWS else _AHEAD_BYTES)
        self._sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(VECTORS)] for _ in range(rows)]

    def emit(self, x: Any, row_bytes: Any, lines: Any, steps: Any, out: Any, out_bytes: Any) -> None:
        builder = self._builder
        for vector in range(VECTORS):
            bias = code.load(builder, builder.add(lines, I64(vector * VECTOR_BYTES)), FLOATS, VECTOR_BYTES)
            for sums in self._sums:
                builder.store(bias, sums[vector])
        line, column = (cgutils.alloca_once(builder, I64) for _ in range(2))
        builder.store(builder.add(lines, I64(LINE_BYTES)), line)
        builder.store(x, column)
        with code.repeated(builder, steps):
            self._add_products(builder.load(line), builder.load(column), row_bytes)
            builder.store(builder.add(builder.load(line), I64(STEP_LINES * LINE_BYTES)), line)
            builder.store(builder.add(builder.load(column), I64(2 * STEP_INPUTS)), column)
        for row, sums in enumerate(self._sums):
            for vector, total in enumerate(sums):
                place = builder.add(
                    builder.add(out, builder.mul(out_bytes, I64(row))), I64(2 * LANES * vector)
                )
                code.store(builder, place, code.narrowed_bfloat16(builder, builder.load(total)), 2)

    def _add_products(self, line: Any, x: Any, row_bytes: Any) -> None:
        builder = self._builder
        rows = [builder.add(x, builder.mul(row_bytes, I64(row))) for row in range(len(self._sums))]
        for index in range(STEP_LINES):
            places = [
                builder.add(line, I64(index * LINE_BYTES + vector * VECTOR_BYTES))
                for vector in range(VECTORS)
            ]
            for place in places:
                code.prefetch(builder, builder.add(place, self._ahead))
            weights = [code.load(builder, place, INTS, VECTOR_BYTES) for place in places]
            for row, sums in zip(rows, self._sums, strict=True):
                pair = code.splat(builder, code.load(builder, builder.add(row, I64(4 * index)), I32, 2))
                for weight, total in zip(weights, sums, strict=True):
                    value = code.bfloat16_products(
                        builder, builder.load(total), weight, pair, self._by_instruction
                    )
                    builder.store(value, total)
