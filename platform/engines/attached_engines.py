"""The engines of other processes, at the sockets that a gateway is given: attached as they appear, forgotten as they go.

Invariant: once the gateway has its model, an engine of another model gets no request.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from glob import glob, has_magic
from typing import Final

import structlog

from loraplex.engine.errors import EngineUnavailable
from loraplex.platform.engines import wire
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.engines.remote_client import RemoteEngine
from loraplex.platform.errors import EngineNotAdded
from loraplex.platform.startup_errors import EngineStartFailed, SettingsError

LOG = structlog.get_logger("loraplex.engines")
FOLLOW_S: Final = 1.0
ADD_TIMEOUT_S: Final = 5.0


def is_pattern(address: str) -> bool:
    """Whether an address stands for all sockets that match it, such as `ipc:///run/loraplex/engine/*.sock`."""
    return has_magic(address)


def existing(addresses: Iterable[str]) -> set[str]:
    """The addresses of the sockets that exist, of patterns and of plain addresses. A path too long for a socket is none."""
    files = (file for each in addresses for file in glob(each.removeprefix(wire.SCHEME)))
    return {f"{wire.SCHEME}{file}" for file in files if len(os.fsencode(file)) <= wire.MAX_SOCKET_PATH}


class AttachedEngines:
    """Keeps the engines of `pool` as `addresses` say: a plain one stays while it is away, one of a pattern has its socket.

    An address keeps its engine's number.
    """

    def __init__(
        self,
        pool: EnginePool,
        addresses: Sequence[str],
        connect: Callable[[str], RemoteEngine],
        drain_s: float = 30.0,
    ) -> None:
        self._pool = pool
        self._connect = connect
        self._drain_s = drain_s
        self._addresses = addresses
        self._fixed = {each for each in addresses if not is_pattern(each)}
        self._added: set[str] = set()
        self._engines: dict[str, RemoteEngine] = {}
        self._numbers: dict[str, int] = {}
        self._model: str | None = None
        for address in filter(self._fixed.__contains__, addresses):
            self._join(address, self._attach(address))

    async def start(self, timeout_s: float) -> None:
        """Wait for the first engine. Raises `EngineStartFailed` after `timeout_s`, or where engines serve different models."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._pool.wait_ready()
        except TimeoutError:
            raise EngineStartFailed("no engine responds at " + ", ".join(self._addresses)) from None
        self._pool.require_one_model()
        self._model = self._pool.info().model_digest

    async def follow(self) -> None:
        """Look for sockets each second, until cancelled."""
        while True:
            await self.update()
            await asyncio.sleep(FOLLOW_S)

    async def update(self) -> None:
        """Attach the engines whose sockets appeared, and forget those whose sockets are gone."""
        present = self._fixed | await asyncio.to_thread(existing, [*self._addresses, *self._added])
        for address in present - self._engines.keys():
            self._attach(address)
        for address, engine in list(self._engines.items()):
            if address in present:
                self._check(address, engine)
            elif not (engine.connected and engine.open_requests):
                await self._detach(address)

    async def close(self) -> None:
        """Close all connections. The engines go on."""
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))

    async def add(self, address: str | None, replaces: int | None) -> int:
        """See `EngineFleet.add`: the engine that listens at `address`, which leaves when its socket does."""
        if address is None:
            raise EngineNotAdded(
                "this gateway starts no engine: name the address of one that runs", "address"
            )
        if address in self._engines:
            raise EngineNotAdded(f"{address} is attached already", "address")
        try:
            wire.socket_path(address)
        except SettingsError as error:
            raise EngineNotAdded(str(error), "address") from None
        engine = self._attach(address)
        self._added.add(address)
        try:
            async with asyncio.timeout(ADD_TIMEOUT_S):
                await engine.wait_ready()
            self._check(address, engine)
        except TimeoutError:
            await self._detach(address)
            raise EngineNotAdded(f"no engine responds at {address}", "address") from None
        if not self._is_joined(address):
            await self._detach(address)
            raise EngineNotAdded(f"the engine at {address} serves another model", "address")
        return self._numbers[address]

    async def drain(self, number: int, grace_s: float | None) -> None:
        """See `EngineFleet.drain`: all gateways of the engine see it."""
        engine = next((each for a, each in self._engines.items() if self._numbers.get(a) == number), None)
        if engine is None:
            raise EngineUnavailable("the engine has left")
        engine.request_drain(self._drain_s if grace_s is None else grace_s)

    def _attach(self, address: str) -> RemoteEngine:
        engine = self._engines[address] = self._connect(address)
        engine.start()
        return engine

    def _is_joined(self, address: str) -> bool:
        return self._pool.engines.get(self._numbers.get(address, -1)) is self._engines[address]

    def _join(self, address: str, engine: RemoteEngine) -> None:
        self._numbers[address] = self._pool.add(engine, self._numbers.get(address))

    def _check(self, address: str, engine: RemoteEngine) -> None:
        """Let an engine that has connected take requests, unless it serves another model."""
        if not engine.connected:
            return
        is_other = self._model is not None and engine.info().model_digest != self._model
        if is_other and self._is_joined(address):
            self._pool.remove(self._numbers[address])
            LOG.error("an engine serves another model: it gets no requests", address=address)
        elif not is_other and not self._is_joined(address):
            self._join(address, engine)

    async def _detach(self, address: str) -> None:
        engine = self._engines.pop(address)
        self._added.discard(address)
        if address in self._numbers:
            self._pool.remove(self._numbers[address])
        await engine.close()
