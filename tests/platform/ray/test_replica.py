"""A replica without a cluster: which deaths of its engine a probe is blamed for, and what its engine gets of deadlines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.messages import AdapterRef, EngineRequest, Event, Finished, Usage
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.ray.messages import ProbeCall, Submission, decode_probed, encode
from loraplex.platform.ray.replica import EngineReplica

ADAPTER = AdapterRef(namespace=b"n" * 32, digest="a" * 64, blob_path="")


class Replica(EngineReplica):
    """One that Serve has not started."""

    def __init__(self, *, connected: bool) -> None:
        self._replica_id = "a"
        self._engine: Any = SimpleNamespace(connected=connected, probe=self._lose, submit=self._submit)
        self._files: Any = SimpleNamespace(probed=self._probed, localize=self._localize)
        self._open = {}
        self.submitted: list[EngineRequest] = []

    def __del__(self) -> None:  # type: ignore[override]  # not awaited here
        """It has started nothing."""

    async def _lose(self, _: AdapterRef) -> None:
        self._engine.connected = False
        raise EngineUnavailable("the engine is not connected")

    async def _localize(self, submission: Submission) -> EngineRequest:
        await asyncio.sleep(0.05)
        return submission.request

    async def _submit(self, request: EngineRequest) -> AsyncIterator[Event]:
        self.submitted.append(request)
        yield Finished("r", 0, "length", Usage(1, 0, 1))

    @asynccontextmanager
    async def _probed(self, *_: object) -> AsyncIterator[AdapterRef]:
        yield ADAPTER


@pytest.mark.parametrize(("connected", "lost_by"), [(True, "a"), (False, None)])
async def test_a_probe_is_blamed_for_an_engine_that_was_there_before(
    connected: bool, lost_by: str | None
) -> None:
    probed = decode_probed(await Replica(connected=connected).probe(encode(ProbeCall(adapter=ADAPTER)), b""))
    assert (probed.report, probed.lost_by) == (None, lost_by)


async def test_the_engine_gets_what_the_gateway_and_the_storage_have_left_of_the_deadlines() -> None:
    request = EngineRequest(
        request_id="r",
        namespace=b"n" * 32,
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=1),
        queue_timeout_s=30.0,
        first_token_timeout_s=60.0,
        total_timeout_s=120.0,
    )
    replica = Replica(connected=True)
    async for _ in replica.generate(encode(Submission(request=request)), b"", waited_s=20.0):
        pass
    (submitted,) = replica.submitted
    left = submitted.timeouts
    assert left["queue_timeout_s"] <= 9.95
    assert left["first_token_timeout_s"] - left["queue_timeout_s"] == pytest.approx(30.0)
    assert left["total_timeout_s"] - left["queue_timeout_s"] == pytest.approx(90.0)
