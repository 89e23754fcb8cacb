"""Runs blocking work on a thread that has ended when its caller continues, even a cancelled caller.

Otherwise a thread could write to a file that its owner has closed and whose descriptor now belongs to another file.
"""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

ArgumentsP = ParamSpec("ArgumentsP")
ResultT = TypeVar("ResultT")


async def on_thread(
    work: Callable[ArgumentsP, ResultT], *args: ArgumentsP.args, **kwargs: ArgumentsP.kwargs
) -> ResultT:
    """Return or raise what `work` does. A cancelled caller waits for it first."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
