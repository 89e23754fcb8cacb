"""Which transactions add up to what an invoice left out: any few of them, or very many as one whole."""

import tracemalloc
from collections.abc import Sequence

import pytest

from loraplex.tenants.invoices import rows
from loraplex.tenants.invoices.lines import Charge
from loraplex.tenants.invoices.rows import _adding_up


@pytest.mark.parametrize(
    ("amounts", "total", "numbers"),
    [
        ([1, 2, 4], 0, []),
        ([1, 2, 4], 5, [0, 2]),
        ([3, -3, 5], 0, []),
        ([3, -1, 5], 4, [1, 2]),
        ([1, 2, 4], 8, None),
        ([1 << each for each in range(40)], (1 << 30) - 1, [*range(30)]),
        ([1 << each for each in range(40)], (1 << 30) + 1, None),
    ],
    ids=["nothing", "some", "no correction", "a correction", "none do", "all until one", "not any of many"],
)
def test_which_transactions_add_up(
    monkeypatch: pytest.MonkeyPatch, amounts: Sequence[int], total: int, numbers: Sequence[int] | None
) -> None:
    monkeypatch.setattr(rows, "MAX_SETS", 1 << 8)
    found = _adding_up([(Charge(each, each),) for each in amounts], (Charge(total, total),))
    assert (found if found is None else [*found]) == numbers


def test_memory_does_not_grow_with_transactions_beyond_the_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_SETS", 1 << 4)
    transactions = [(Charge(1 << each % 64, 1),) for each in range(1000)]
    total = (Charge(sum(each.tokens for (each,) in transactions), len(transactions)),)
    tracemalloc.start()
    try:
        found = _adding_up(transactions, total)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found is not None and [*found] == [*range(1000)]
    assert peak < 100_000
