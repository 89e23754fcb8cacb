"""A deadline for replies of another process that excludes delays of this process.

Invariant: on an event loop that is not late, a block ends at its deadline.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# A loop that is later than this was blocked by a long callback or by other processes.
LATE_SECONDS = 0.005
GRACE_SECONDS = 0.01


@asynccontextmanager
async def deadline(at: float) -> AsyncIterator[None]:
    """Raise `TimeoutError` when the block runs until `at`, a time of the running loop.

    A loop that is late reads for `GRACE_SECONDS` more: the reply may have been in its socket in time.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as bound:

        def expire() -> None:
            now = loop.time()
            bound.reschedule(now + GRACE_SECONDS if now - at > LATE_SECONDS else now)

        timer = loop.call_at(at, expire)
        try:
            yield
        finally:
            timer.cancel()
