"""Attempts a step of the background, once or until it is cancelled.

Invariant: no failure ends what goes on. Of the errors that `repeat` takes as `retried`, such as those of a store that is away, only
the first in a row is logged.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from structlog.stdlib import BoundLogger

from loraplex.tenants.errors import StoreUnavailable, TenantsError


async def repeat(
    log: BoundLogger,
    step: Callable[[], Awaitable[object]],
    seconds: float,
    event: str = "will be tried again",
    retried: tuple[type[Exception], ...] = (StoreUnavailable,),
) -> None:
    """Run `step`, wait `seconds`, and so on. `event`: what a failure is logged as. An error that is `retried` is a warning, another
    one has its traceback.
    """
    has_failed = False
    while True:
        try:
            await step()
            has_failed = False
        except retried as error:
            if not has_failed:
                log.warning(event, step=step.__name__, reason=str(error))
            has_failed = True
        except Exception:
            log.exception(event, step=step.__name__)
        await asyncio.sleep(seconds)


async def attempt(
    log: BoundLogger,
    step: Awaitable[Any],
    failed: str,
    retried: tuple[type[Exception], ...] = (TenantsError,),
    /,
    **facts: str,
) -> Any:
    """Return the result of `step`; None if it failed. An error that is `retried` is a warning, another one is logged as `failed`."""
    try:
        return await step
    except retried as error:
        log.warning("tried again later", error=str(error)[:200], **facts)
    except Exception:
        log.exception(failed, **facts)
    return None
