"""`/metrics`: rendered on a thread at most once per `RENDER_INTERVAL_S`, however often it is requested.

Invariant: one rendering runs at a time, so collectors need no lock; on the event loop they read only values that it replaces.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from loraplex.tenants.single_flight import SingleFlight

RENDER_INTERVAL_S: Final = 1.0


class MetricsExposition:
    """The newest text that `render` returned. Requests share a rendering that is in progress (single-flight)."""

    def __init__(self, render: Callable[[], bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self._render = render
        self._clock = clock
        self._text = b""
        self._expires = -math.inf
        # A thread cannot be cancelled: a second rendering would run beside it.
        self._rendering = SingleFlight[None](cancels=False)

    async def text(self) -> bytes:
        """Return a text that was rendered at most `RENDER_INTERVAL_S` ago."""
        if self._clock() >= self._expires:
            await self._rendering.run("metrics", self._renew)
        return self._text

    async def _renew(self) -> None:
        self._text = await asyncio.to_thread(self._render)
        self._expires = self._clock() + RENDER_INTERVAL_S


def metrics_router(exposition: MetricsExposition) -> APIRouter:
    """Build the router of `/metrics`, without credentials."""
    router = APIRouter(include_in_schema=False)

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(await exposition.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    return router
