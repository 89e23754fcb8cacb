"""Row counts of captured steps: few enough to capture them all, dense enough for little padding."""

from bisect import bisect_left

DENSE_STEP = 8
"""A tile of rows of most kernels: within it, padding costs next to nothing."""
MAX_DENSE = 256
SPARSE_STEP = 64
MAX_ROWS = 1024
"""Above this many rows launches no longer matter, and a step runs without a graph."""


class Buckets:
    """1, 2, 4, 8, 16, 24, 32 … and the largest row count of a step."""

    def __init__(self, max_rows: int) -> None:
        """Raises `ValueError` for fewer than 1 row."""
        if max_rows < 1:
            raise ValueError(f"a step has at least 1 row, not {max_rows}")
        most = min(max_rows, MAX_ROWS)
        sizes = (1, 2, 4, *range(DENSE_STEP, MAX_DENSE, DENSE_STEP), *range(MAX_DENSE, most, SPARSE_STEP))
        self.sizes: tuple[int, ...] = (*(size for size in sizes if size < most), most)

    @property
    def most(self) -> int:
        return self.sizes[-1]

    def of(self, rows: int) -> int | None:
        """Return the smallest size for `rows`; None when there is none."""
        index = bisect_left(self.sizes, rows)
        return self.sizes[index] if rows > 0 and index < len(self.sizes) else None
