"""Joins the events of one stream into batches, because each message between processes of Ray costs some 100 us.

Invariant: the first events and the last ones are sent at once; the others wait until 10 ms or 8 tokens have come together.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Final

from loraplex.engine.messages import Delta, Event

BATCH_S: Final = 0.01
BATCH_TOKENS: Final = 8


async def batches(events: AsyncGenerator[Event, None]) -> AsyncGenerator[list[Event], None]:
    """Yield the events in order. Closing this iterator closes `events`."""
    queue: asyncio.Queue[Event | None] = asyncio.Queue()
    reader = asyncio.create_task(_read(events, queue))
    is_open, waits = True, False
    try:
        while is_open:
            batch: list[Event] = []
            is_open = await _fill(batch, queue, waits=waits)
            if batch:
                yield batch
            waits = waits or any(isinstance(event, Delta) for event in batch)
        await reader
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def _read(events: AsyncGenerator[Event, None], queue: asyncio.Queue[Event | None]) -> None:
    try:
        async for event in events:
            queue.put_nowait(event)
    finally:
        queue.put_nowait(None)
        await events.aclose()


async def _fill(batch: list[Event], queue: asyncio.Queue[Event | None], *, waits: bool) -> bool:
    """Take what is there, and what comes within `BATCH_S` if this batch `waits`. Returns False after the last event."""
    if not _add(batch, await queue.get()):
        return False
    with suppress(TimeoutError):
        async with asyncio.timeout(BATCH_S if waits else 0):
            while _tokens(batch) < BATCH_TOKENS:
                if not _add(batch, await queue.get()):
                    return False
    return True


def _add(batch: list[Event], event: Event | None) -> bool:
    if event is not None:
        batch.append(event)
    return event is not None


def _tokens(batch: list[Event]) -> int:
    return sum(len(event.token_ids) for event in batch if isinstance(event, Delta))
