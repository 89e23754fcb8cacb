"""Rows wait for the statement in progress and go together; each caller gets its own row's result."""

import asyncio

import psycopg
import pytest

from loraplex.tenants.errors import DatabaseUnavailable
from loraplex.tenants.ledger.write_batching import WriteBatcher


class Table:
    """Doubles numbers; refuses 13, and everything while it is down."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.down = False
        self.open = asyncio.Event()
        self.open.set()

    async def run(self, rows: list[int]) -> list[int]:
        self.batches.append(rows)
        await self.open.wait()
        if self.down:
            raise DatabaseUnavailable("down")
        if 13 in rows:
            raise psycopg.DataError("13")
        return [2 * row for row in rows]


async def test_rows_go_together_while_a_statement_runs() -> None:
    table = Table()
    rows = WriteBatcher(table.run, max_rows=3)
    assert await asyncio.gather(*(rows.add(number) for number in range(5))) == [0, 2, 4, 6, 8]
    assert table.batches == [[0, 1, 2], [3, 4]]


async def test_a_refused_row_fails_alone() -> None:
    rows = WriteBatcher(Table().run)
    results = await asyncio.gather(*(rows.add(number) for number in (1, 13, 2)), return_exceptions=True)
    assert (results[0], results[2]) == (2, 4)
    assert isinstance(results[1], psycopg.DataError)


async def test_a_store_that_is_down_fails_the_batch_at_once() -> None:
    table = Table()
    table.down = True
    rows = WriteBatcher(table.run)
    results = await asyncio.gather(*(rows.add(number) for number in range(9)), return_exceptions=True)
    assert all(isinstance(each, DatabaseUnavailable) for each in results)
    assert len(table.batches) == 1
    table.down = False
    assert await rows.add(4) == 8


async def test_a_cancelled_caller_does_not_affect_the_others() -> None:
    table = Table()
    table.open.clear()
    rows = WriteBatcher(table.run)
    leaving, staying = rows.add(1), rows.add(2)
    await asyncio.sleep(0.01)
    leaving.cancel()
    table.open.set()
    assert await staying == 4
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await rows.close()
