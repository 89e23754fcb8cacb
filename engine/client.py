"""`EngineClient`: the interface between gateways and engines: in-process, over a socket, on Ray, or scripted in tests."""

from collections.abc import AsyncIterator
from typing import Protocol

from loraplex.engine.messages import AdapterRef, EngineInfo, EngineRequest, EngineStats, Event, ProbeReport


class EngineClient(Protocol):
    """A running engine. All methods are safe to call from one event loop concurrently."""

    def info(self) -> EngineInfo:
        """Facts of the served model. Raises `EngineUnavailable` before the engine is ready."""
        ...

    def submit(self, request: EngineRequest) -> AsyncIterator[Event]:
        """Stream the events of one request until every choice finished or it failed.

        Errors before or during the run arrive as `Failed`, never as exceptions. Closing the iterator aborts.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request at any stage. Idempotent; returns once the engine has acknowledged."""
        ...

    async def probe(self, adapter: AdapterRef) -> ProbeReport:
        """Load an adapter as a request would and check it while requests run; see `ProbeReport`.

        Raises `EngineError` when the failure is not the adapter's: the engine is unavailable, overloaded or too slow.
        """
        ...

    async def forget(self, namespace: bytes) -> None:
        """Fail a tenant's requests and drop its cached blocks and idle adapters. Idempotent; returns once it is done.

        Blocks and adapters that are still in use are freed as their rows end. Raises `EngineUnavailable` when the engine
        cannot be reached.
        """
        ...

    async def wait_ready(self) -> None:
        """Return once the engine takes requests. A lost one does again when it was restarted."""
        ...

    async def stats(self) -> EngineStats:
        """A snapshot. Raises `EngineUnavailable` when the engine does not answer within a second."""
        ...

    async def drain(self) -> None:
        """Refuse new requests and return when the running ones have ended."""
        ...
