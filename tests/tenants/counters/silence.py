"""Waits for work of a stub server as a command waits for its reply."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from loraplex.tenants.counters.pipelined_commands import ReplyClock, SilenceTimer

Result = TypeVar("Result")


async def reply_of(work: Coroutine[Any, Any, Result], wait_s: float, replies: ReplyClock) -> Result:
    """The result of `work`. Raises `TimeoutError` once the server was silent for `wait_s`."""
    reply: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
    working = asyncio.create_task(work)

    def answer(done: "asyncio.Task[Result]") -> None:
        if reply.done() or done.cancelled():
            return
        error = done.exception()
        reply.set_result(done.result()) if error is None else reply.set_exception(error)

    working.add_done_callback(answer)
    timer = SilenceTimer(reply, wait_s, replies)
    try:
        return await reply
    finally:
        timer.cancel()
        working.cancel()
