"""Shapes of captured steps: few enough to capture them all, dense enough for little padding."""

from dataclasses import dataclass

from loraplex.engine.batch.step_plan import MAX_DECODES

DENSE_STEP = 8
"""A tile of rows of most kernels: within it, padding costs next to nothing."""
MAX_DENSE = 256
SPARSE_STEP = 64
MAX_ROWS = 1024
"""Above this many rows launches no longer matter, and a step runs without a graph."""
FORCED_TOKENS = 256
"""Most decodes of a step with forced tokens, if its rows are not more: each takes memory for partial sums of attention."""
MIXED_TOKENS = (128, 256, 512, 1024, 2048)
"""Sizes of steps with chunks. With more tokens the device computes for longer than the host launches."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The fixed counts of a captured step: `tokens`, of which at most `decodes` decode, prefill `chunks`, rows of logits.

    If `samples` is None, every token has logits.
    """

    tokens: int
    decodes: int
    chunks: int
    samples: int | None

    @property
    def logits(self) -> int:
        """Rows of logits."""
        return self.tokens if self.samples is None else self.samples

    def fits(self, tokens: int, decodes: int, chunks: int, samples: int) -> bool:
        """Whether a step of so many of each can be padded to this one."""
        return (
            tokens <= self.tokens
            and decodes <= self.decodes
            and chunks <= self.chunks
            and samples <= self.logits
        )


class Buckets:
    """The shapes of steps of at most `max_tokens` tokens in `max_rows` rows.

    Decodes: 1, 2, 4, 8, 16, 24, 32 ... tokens up to the rows; then doubled sizes, for tokens that a grammar forces. Steps
    with chunks: `MIXED_TOKENS`.
    """

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        """Raises `ValueError` for fewer than 1 row, or more rows than tokens."""
        if not 1 <= max_rows <= max_tokens:
            raise ValueError(f"a step has at least 1 row of at least 1 token, not {max_rows} of {max_tokens}")
        self.rows = min(max_rows, MAX_ROWS)
        decodes = _decode_sizes(self.rows, max_tokens)
        self.most_decodes = decodes[-1]
        self.shapes: tuple[StepShape, ...] = (
            *(StepShape(size, size, 0, None if size <= self.rows else self.rows) for size in decodes),
            *(
                StepShape(size, min(size, decodes[-1]), min(size, self.rows), min(size, self.rows))
                for size in _mixed_sizes(max_tokens)
            ),
        )

    @property
    def most(self) -> int:
        """Tokens of the largest shape."""
        return max(shape.tokens for shape in self.shapes)

    def of(self, tokens: int, decodes: int, chunks: int, samples: int) -> StepShape | None:
        """Return the first shape that fits a step, decodes before mixed steps; None when there is none."""
        fitting = (shape for shape in self.shapes if shape.fits(tokens, decodes, chunks, samples))
        return next(fitting, None) if tokens else None


def _decode_sizes(rows: int, max_tokens: int) -> list[int]:
    dense = (1, 2, 4, *range(DENSE_STEP, MAX_DENSE, DENSE_STEP), *range(MAX_DENSE, MAX_ROWS, SPARSE_STEP))
    sizes = [*(size for size in dense if size < rows), rows]
    most = min(max(rows, FORCED_TOKENS), rows * MAX_DECODES, max_tokens)
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes


def _mixed_sizes(max_tokens: int) -> list[int]:
    most = min(max_tokens, MIXED_TOKENS[-1])
    return [*(size for size in MIXED_TOKENS if size < most), most]
