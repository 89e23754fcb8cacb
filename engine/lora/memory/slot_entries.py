"""`TableRows`: an adapter's entries in the tables of all sites, computed once; only page addresses are filled in per load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loraplex.engine.lora.site import A_PAGES, RANK, SCALES


@dataclass(frozen=True, slots=True)
class ModulePages:
    """Pages of A [rank, in], of B [rank, out] and of the fp32 scales, as numbers in `PackedAdapter.pages`."""

    rank: int
    a: tuple[int, ...]
    b: tuple[int, ...]
    scales: int | None


@dataclass(frozen=True, slots=True)
class TableRows:
    """`shape` (modules of the model, columns); `rank_cells` hold `ranks`, `page_cells` the addresses of `pages`."""

    shape: tuple[int, int]
    rank_cells: NDArray[np.int64]
    ranks: NDArray[np.int64]
    page_cells: NDArray[np.int64]
    pages: NDArray[np.int64]

    def at(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the entries one after another; `addresses[i]` is the address of page i."""
        cells = np.zeros(self.shape[0] * self.shape[1], dtype=np.int64)
        cells[self.rank_cells] = self.ranks
        cells[self.page_cells] = addresses[self.pages]
        return cells


def table_rows(modules: Mapping[str, ModulePages], names: Sequence[str], max_pages: int) -> TableRows:
    """Rows for tables of `names` in this order, with room for `max_pages` of A and of B each."""
    columns = A_PAGES + 2 * max_pages
    ranks: list[tuple[int, int]] = []
    pages: list[tuple[int, int]] = []
    for number, name in enumerate(names):
        module = modules.get(name)
        if module is None:
            continue
        cell = number * columns
        ranks.append((cell + RANK, module.rank))
        pages += enumerate(module.a, cell + A_PAGES)
        pages += enumerate(module.b, cell + A_PAGES + max_pages)
        if module.scales is not None:
            pages.append((cell + SCALES, module.scales))
    return TableRows((len(names), columns), *_columns(ranks), *_columns(pages))


def _columns(pairs: list[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return array[:, 0].copy(), array[:, 1].copy()
