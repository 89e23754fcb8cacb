"""Bounds one stage of a start, so that a store which accepts and never answers ends it by the stage's name."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from loraplex.platform.startup_errors import StageHung

STAGE_SECONDS: Final = 60.0


@asynccontextmanager
async def bounded_stage(stage: str) -> AsyncIterator[None]:
    """Bound what the block waits for. Raises `StageHung`."""
    try:
        async with asyncio.timeout(STAGE_SECONDS) as bound:
            yield
    except TimeoutError:
        if not bound.expired():
            raise
        raise StageHung(
            f"the start hung for {STAGE_SECONDS:g} s at: {stage}; check that PostgreSQL and Valkey answer"
        ) from None
