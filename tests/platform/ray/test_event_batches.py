"""Events of a stream are joined without changing their order, and without delaying the first and the last ones."""

import asyncio
from collections.abc import AsyncGenerator

from loraplex.engine.messages import Delta, Event, Finished, Started, Usage
from loraplex.platform.ray.event_batches import BATCH_TOKENS, batches

END = Finished("r", 0, "length", Usage(1, 0, 20))


def delta(number: int) -> Delta:
    return Delta("r", 0, [number], f"{number} ")


async def at_once(*events: Event) -> AsyncGenerator[Event, None]:
    for event in events:
        yield event


async def test_a_batch_has_at_most_eight_tokens_of_deltas_that_are_there() -> None:
    events: list[Event] = [Started("r", None, 0), *(delta(number) for number in range(20)), END]
    found = [batch async for batch in batches(at_once(*events))]
    assert [event for batch in found for event in batch] == events
    assert max(len([event for event in batch if isinstance(event, Delta)]) for batch in found) == BATCH_TOKENS


async def test_the_first_events_do_not_wait_for_more() -> None:
    more = asyncio.Event()

    async def slow() -> AsyncGenerator[Event, None]:
        yield Started("r", None, 0)
        await more.wait()
        yield delta(1)
        yield END

    stream = batches(slow())
    assert await anext(stream) == [Started("r", None, 0)]
    more.set()
    assert [batch async for batch in stream] == [[delta(1), END]]


async def test_closing_the_batches_closes_the_events() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[Event, None]:
        try:
            while True:
                yield delta(1)
                await asyncio.sleep(0)
        finally:
            closed.set()

    stream = batches(endless())
    await anext(stream)
    await stream.aclose()
    assert closed.is_set()
