"""How many rows a captured step has: few enough sizes to capture them all, dense enough that little is padded."""

from bisect import bisect_left

DENSE_STEP = 8
"""A tile of rows of most kernels: within it, padding costs next to nothing."""
MAX_DENSE = 256
SPARSE_STEP = 64
MAX_ROWS = 1024
"""Beyond it launches no longer matter, and a step is computed without a graph."""


class Buckets:
    """1, 2, 4, 8, 16, 24, 32 … and the most rows a step may have."""

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
        """The smallest size that holds `rows`; None when there is none."""
        index = bisect_left(self.sizes, rows)
        return self.sizes[index] if rows > 0 and index < len(self.sizes) else None
