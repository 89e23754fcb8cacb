"""What the start of a gateway is given, how long a stage of it may wait, and the tasks that run beside a block."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from loraplex.platform.config import Settings
from loraplex.platform.engines.startup import StartingEngines
from loraplex.platform.processes.progress import Progress
from loraplex.platform.startup_errors import StageHung

STAGE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayStart:
    """`model` is None when other processes run the engines, which the caller ends. `accept_new_secret`: the server secret may be
    another one than the database knows.
    """

    settings: Settings
    model: str | None
    engines: StartingEngines
    on_stage: Progress
    accept_new_secret: bool = False


@asynccontextmanager
async def bounded_stage(stage: str) -> AsyncIterator[None]:
    """Bound what the block waits for, so that a store which accepts and never answers is named. Raises `StageHung`."""
    try:
        async with asyncio.timeout(STAGE_SECONDS) as bound:
            yield
    except TimeoutError:
        if not bound.expired():
            raise
        raise StageHung(
            f"the start hung for {STAGE_SECONDS:g} s at: {stage}; check that PostgreSQL and Valkey answer"
        ) from None


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` as a task beside the block, at the end of which it is cancelled and awaited. Its errors are ignored."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
