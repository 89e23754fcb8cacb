"""One run of the work for all that ask for it meanwhile; the next asks again."""

import asyncio

import pytest

from loraplex.tenants.single_flight import SingleFlight


class Work:
    """Counts its runs, each of which lasts until `end`; a run returns its number or raises `error`."""

    def __init__(self) -> None:
        self.runs = self.cancelled = 0
        self.end = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.runs = number = self.runs + 1
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return number


async def begin(flights: SingleFlight[int], work: Work, callers: int) -> list["asyncio.Task[int]"]:
    tasks = [asyncio.create_task(flights.run("key", work)) for _ in range(callers)]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


async def test_a_run_is_shared_and_the_next_begins_after_it() -> None:
    flights, work = SingleFlight[int](), Work()
    first = await begin(flights, work, 3)
    other = asyncio.create_task(flights.run("other", work))
    work.end.set()
    assert await asyncio.gather(*first) == [1, 1, 1] and await other == 2
    assert await flights.run("key", work) == 3 and not flights._running


async def test_an_error_is_raised_for_all() -> None:
    flights, work = SingleFlight[int](), Work()
    callers = await begin(flights, work, 2)
    work.error = ValueError()
    work.end.set()
    assert await asyncio.gather(*callers, return_exceptions=True) == [work.error] * 2
    with pytest.raises(ValueError):
        await flights.run("key", work)
    assert work.runs == 2


async def test_work_goes_on_until_all_have_left() -> None:
    flights, work = SingleFlight[int](), Work()
    callers = await begin(flights, work, 2)
    callers[0].cancel()
    await asyncio.gather(callers[0], return_exceptions=True)
    assert work.cancelled == 0
    callers[1].cancel()
    late = asyncio.create_task(flights.run("key", work))
    await asyncio.gather(callers[1], return_exceptions=True)
    await asyncio.sleep(0)
    work.end.set()
    assert await late == 2 and work.cancelled == 1


async def test_work_that_is_not_cancelled_serves_the_next_callers() -> None:
    flights, work = SingleFlight[int](cancels=False), Work()
    callers = await begin(flights, work, 2)
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    late = await begin(flights, work, 1)
    assert "key" in flights
    work.end.set()
    assert await late[0] == 1 and work.cancelled == 0 and "key" not in flights


async def test_work_that_has_just_ended_is_not_joined() -> None:
    """Not even in the cycle of the event loop in which it ended, before the callbacks of its task."""
    flights, work = SingleFlight[int](), Work()
    [caller] = await begin(flights, work, 1)
    task = flights._running["key"].task
    work.end.set()
    while not task.done():
        await asyncio.sleep(0)
    assert flights._running and "key" not in flights
    assert await flights.run("key", work) == 2 and await caller == 1
