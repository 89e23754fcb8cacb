"""A replica without a cluster: which deaths of its engine a probe is blamed for."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.messages import AdapterRef
from loraplex.platform.ray.messages import ProbeCall, decode_probed, encode
from loraplex.platform.ray.replica import EngineReplica

ADAPTER = AdapterRef(namespace=b"n" * 32, digest="a" * 64, blob_path="")


class Replica(EngineReplica):
    """One that Serve has not started."""

    def __init__(self, *, connected: bool) -> None:
        self._replica_id = "a"
        self._engine: Any = SimpleNamespace(connected=connected, probe=self._lose)
        self._files: Any = SimpleNamespace(probed=self._probed)

    def __del__(self) -> None:  # type: ignore[override]  # not awaited here
        """It has started nothing."""

    async def _lose(self, _: AdapterRef) -> None:
        self._engine.connected = False
        raise EngineUnavailable("the engine is not connected")

    @asynccontextmanager
    async def _probed(self, *_: object) -> AsyncIterator[AdapterRef]:
        yield ADAPTER


@pytest.mark.parametrize(("connected", "lost_by"), [(True, "a"), (False, None)])
async def test_a_probe_is_blamed_for_an_engine_that_was_there_before(
    connected: bool, lost_by: str | None
) -> None:
    probed = decode_probed(await Replica(connected=connected).probe(encode(ProbeCall(adapter=ADAPTER)), b""))
    assert (probed.report, probed.lost_by) == (None, lost_by)
