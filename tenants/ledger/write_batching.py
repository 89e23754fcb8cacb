"""Batches writes: rows that arrive while a statement runs go together into the next one.

Invariant: a row is in one statement at a time, and its caller gets that statement's outcome.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import psycopg

from loraplex.tenants.errors import DatabaseUnavailable, TenantsError

MAX_ROWS = 256

Row = TypeVar("Row")
Result = TypeVar("Result")


class WriteBatcher(Generic[Row, Result]):
    """Sends rows in batches. `run` takes a batch and returns one result per row, in order."""

    def __init__(
        self, run: Callable[[list[Row]], Awaitable[Sequence[Result]]], max_rows: int = MAX_ROWS
    ) -> None:
        self._run = run
        self._max_rows = max_rows
        self._waiting: list[tuple[Row, asyncio.Future[Result]]] = []
        self._worker: asyncio.Task[None] | None = None

    def add(self, row: Row) -> asyncio.Future[Result]:
        """Write a row; the future gets its result. One that is cancelled does not remove its row from a statement."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((row, future))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        return future

    async def close(self) -> None:
        """Wait until no statement is in progress."""
        if self._worker is not None:
            await asyncio.wait({self._worker})

    async def _work(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[: self._max_rows], self._waiting[self._max_rows :]
                await self._send(batch)
        finally:
            self._worker = None
            stopped = DatabaseUnavailable("the server is stopping")
            _fail([future for _, future in self._waiting], stopped)
            self._waiting = []

    async def _send(self, batch: list[tuple[Row, asyncio.Future[Result]]]) -> None:
        """Send one batch. A row that PostgreSQL rejects fails alone: all rows of the batch are then sent one by one."""
        futures = [future for _, future in batch]
        try:
            results = await self._run([row for row, _ in batch])
        except TenantsError as error:
            _fail(futures, error)
        except psycopg.Error as error:
            if len(batch) == 1:
                _fail(futures, error)
                return
            for each in batch:
                await self._send([each])
        except BaseException:
            _fail(futures, DatabaseUnavailable("the server is stopping"))
            raise
        else:
            for future, result in zip(futures, results, strict=True):
                if not future.done():
                    future.set_result(result)


def _fail(futures: Sequence[asyncio.Future[Result]], error: Exception) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)
