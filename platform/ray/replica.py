"""One engine replica of the Ray Serve deployment: a supervised engine process, and a bridge from its socket to Ray.

Invariant: the engine process ends with the replica. A crashed or hung engine is restarted here; in a crash loop the health
check fails, and Serve replaces the replica.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing
from datetime import UTC, datetime
from typing import Any, Final

import structlog
from ray import serve

from loraplex.adapters.errors import BlobStoreUnavailable, StorageError
from loraplex.engine.errors import AdapterError, AdapterLoadFailed, EngineError, EngineUnavailable
from loraplex.engine.messages import Event, Failed
from loraplex.platform.config import Settings, load_settings
from loraplex.platform.datastores.adapter_storage import AdapterStorage
from loraplex.platform.engines.process import EngineProcess
from loraplex.platform.engines.startup import open_lone_engine, own_address, socket_folder
from loraplex.platform.processes.logs import configure_logs
from loraplex.platform.ray.adapter_files import AdapterFiles
from loraplex.platform.ray.event_batches import batches
from loraplex.platform.ray.messages import (
    Accepted,
    Probed,
    ReplicaReport,
    Submission,
    decode_probe_call,
    decode_submission,
    encode,
    never_run,
)
from loraplex.platform.ray.router import REPORT
from loraplex.platform.startup_errors import EngineStartFailed, SettingsError

LOG: Final = structlog.get_logger("loraplex.ray")


def replica_settings(given: Mapping[str, Any]) -> Settings:
    """The settings of a replica: `given`, then those of its machine's environment. Raises `SettingsError`."""
    settings = load_settings({**given, "role": "engine"})
    if settings.model is None:
        raise SettingsError("setting `model`: none given; name it in the arguments of the Serve application")
    return settings


class EngineReplica:
    """The class of the deployment. Ray calls its methods on one event loop; arguments and results are bytes."""

    async def __init__(self, given: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        """Start the engine and wait until it takes requests. Raises `StartError`."""
        settings = replica_settings(given)
        configure_logs(settings.log_level)
        for warning in settings.without_effect:
            LOG.warning(warning)
        self._replica_id = serve.get_replica_context().replica_tag
        self._stack = AsyncExitStack()
        address = own_address(socket_folder(settings.data_dir, self._stack))
        self._process = await _open_engine(settings, address, self._stack)
        self._engine = self._process.client
        storage = AdapterStorage(settings, self._engine.info().model_digest)
        self._files = AdapterFiles(storage)
        self._stack.callback(asyncio.create_task(self._files.run_eviction()).cancel)
        self._open: dict[str, asyncio.Event] = {}

    async def generate(self, encoded: bytes, placing: bytes, waited_s: float) -> AsyncIterator[bytes]:
        """Stream a request's replies: `Accepted`, then batches of events. Closing the stream aborts the request."""
        submission, since = decode_submission(encoded), time.monotonic() - waited_s
        yield encode(Accepted(self._replica_id))
        async with aclosing(batches(self._events(submission, since))) as stream:
            async for batch in stream:
                yield encode(batch)

    async def _events(self, submission: Submission, since: float) -> AsyncGenerator[Event, None]:
        request_id = submission.request.request_id
        self._open[request_id] = is_aborted = asyncio.Event()
        try:
            localized = await self._files.localize(submission)
            request = localized.shortened(time.monotonic() - since)
            if is_aborted.is_set():
                for event in never_run(request):
                    yield event
                return
            async with aclosing(self._engine.submit(request)) as events:  # type: ignore[type-var]  # a generator
                async for event in events:
                    yield event
        except (StorageError, AdapterError) as error:
            yield _refused(request_id, error)
        finally:
            del self._open[request_id]

    async def abort(self, request_ids: list[str]) -> None:
        """End requests; those that do not run here are ignored."""
        for request_id in self._open.keys() & set(request_ids):
            self._open[request_id].set()
            await self._engine.abort(request_id)

    async def forget(self, namespace: bytes) -> None:
        """See `EngineClient.forget`. Raises `EngineUnavailable`."""
        await self._engine.forget(namespace)

    async def probe(self, encoded: bytes, placing: bytes, weights: bytes | None = None) -> bytes:
        """Probe an adapter; returns a `Probed`."""
        call, had_engine = decode_probe_call(encoded), False
        try:
            async with self._files.probed(call, weights) as adapter:
                had_engine = self._engine.connected
                return encode(Probed(await self._engine.probe(adapter)))
        except (StorageError, EngineError) as error:
            # An engine that was away before has not been lost by this adapter.
            was_lost = had_engine and not self._engine.connected
            return encode(Probed(None, str(error), self._replica_id if was_lost else None))

    async def record_routing_stats(self) -> dict[str, bytes]:
        """What Serve sends to the routers of all gateways, every `STATS_S` seconds."""
        engine = self._engine
        report = ReplicaReport(
            info=engine.info(),
            stats=engine.last_stats,
            at=datetime.now(UTC),
            restarts=engine.restarts,
            deaths=engine.deaths,
            failure=engine.failure,
        )
        return {REPORT: encode(report)}

    async def check_health(self) -> None:
        """Reads state only. Raises `EngineStartFailed` once the engine is not restarted any more."""
        if self._process.crash_loop.is_set():
            raise EngineStartFailed(str(self._engine.failure))

    async def __del__(self) -> None:
        """End the engine. Serve calls it once, when no request runs here any more or the grace is over."""
        await self._stack.aclose()


async def _open_engine(settings: Settings, address: str, stack: AsyncExitStack) -> EngineProcess:
    def log_stage(text: str) -> None:
        LOG.info("engine", stage=text)

    return await open_lone_engine(settings, str(settings.model), address, stack, log_stage)


def _refused(request_id: str, error: StorageError | AdapterError) -> Failed:
    """What the client gets: another replica may be able to read the storage, but no replica finds a missing adapter."""
    is_away = isinstance(error, BlobStoreUnavailable)
    code = EngineUnavailable.code if is_away else AdapterLoadFailed.code
    return Failed(request_id, code, str(error))
