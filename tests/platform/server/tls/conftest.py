"""Tests of the server run on its event loop, where a connection begins in another order than on asyncio's own."""

import asyncio
from collections.abc import Callable

import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the loop of `loraplex serve`."""
    return {"uvloop": uvloop.new_event_loop}
