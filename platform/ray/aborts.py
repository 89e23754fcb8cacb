"""Aborts of requests on replicas: sent to all of them, together, again and again until each request has ended."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from ray.serve.handle import DeploymentHandle

from loraplex.engine.errors import EngineUnavailable
from loraplex.platform.ray.replica_calls import call_listed
from loraplex.platform.ray.replica_set import ReplicaSet
from loraplex.platform.ray.routed_request import RoutedRequest

REPEAT_S: Final = 0.5
GATHER_S: Final = 0.005
"""Aborts that begin within it are one call."""


class Aborts:
    """`handle` is that of the replicas, `spawn` begins a task."""

    def __init__(
        self,
        replicas: ReplicaSet,
        handle: "Callable[[], DeploymentHandle[Any]]",
        spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
    ) -> None:
        self._replicas = replicas
        self._handle = handle
        self._spawn = spawn
        self._open: set[RoutedRequest] = set()
        self.sending: asyncio.Task[None] | None = None

    def begin(self, routed: RoutedRequest) -> None:
        """Send the abort until the request has ended. One that no replica has yet is cancelled."""
        routed.is_aborted = True
        if routed.ended.is_set():
            return
        if routed.replica_id is None:
            routed.cancel()
        self._open.add(routed)
        if self.sending is None or self.sending.done():
            self.sending = self._spawn(self._send())

    async def send_unknown(self, request_id: str) -> None:
        """Abort a request of another gateway."""
        await self._try_send([request_id])

    async def _send(self) -> None:
        while self._open:
            await asyncio.sleep(GATHER_S)
            self._open = {routed for routed in self._open if not routed.ended.is_set()}
            open_now = list(self._open)
            if not open_now:
                return
            self._cancel_on_leaving(open_now)
            self._spawn(self._try_send([routed.request.request_id for routed in open_now]))
            endings = [asyncio.create_task(routed.ended.wait()) for routed in open_now]
            await asyncio.wait(endings, timeout=REPEAT_S)
            for ending in endings:
                ending.cancel()

    def _cancel_on_leaving(self, all_routed: list[RoutedRequest]) -> None:
        """Cancel those on replicas that drain, without their usage: Serve sends no call to such a replica, but their streams are open."""
        for routed in all_routed:
            if routed.replica_id is not None and not self._replicas.lists(routed.replica_id):
                routed.cancel()

    async def _try_send(self, request_ids: list[str]) -> None:
        with suppress(EngineUnavailable):  # sent again while one of them is open
            await call_listed(self._handle(), "abort", request_ids)
