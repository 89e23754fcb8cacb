"""Blocking work on a thread that is over when its caller goes on, even a cancelled one.

Otherwise a thread could write to a file that its owner has closed, and whose descriptor is another file's by then.
"""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

ArgumentsP = ParamSpec("ArgumentsP")
ResultT = TypeVar("ResultT")


async def on_thread(
    work: Callable[ArgumentsP, ResultT], *args: ArgumentsP.args, **kwargs: ArgumentsP.kwargs
) -> ResultT:
    """What `work` returns or raises. When cancelled, waits for it first."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
