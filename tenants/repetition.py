"""Repeats a step of the background until it is cancelled.

Invariant: no failure ends it. Of failures of a store, which repeat while the store is away, only the first in a row is logged.
"""

import asyncio
from collections.abc import Awaitable, Callable

from structlog.stdlib import BoundLogger

from loraplex.tenants.errors import StoreUnavailable


async def repeat(
    log: BoundLogger,
    step: Callable[[], Awaitable[object]],
    seconds: float,
    event: str = "will be tried again",
) -> None:
    """Run `step`, wait `seconds`, and so on. `event`: what a failure is logged as."""
    has_failed = False
    while True:
        try:
            await step()
            has_failed = False
        except StoreUnavailable as error:
            if not has_failed:
                log.warning(event, step=step.__name__, reason=str(error))
            has_failed = True
        except Exception:
            log.exception(event, step=step.__name__)
        await asyncio.sleep(seconds)
