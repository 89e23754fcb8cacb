"""The client of all replicas without a cluster: how it ends what was aborted, refused or lost."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace
from ray.exceptions import ActorDiedError, TaskCancelledError

from loraplex.engine.fake_engine import DEFAULT_INFO
from loraplex.engine.messages import Delta, EngineRequest, EngineStats, Event, Failed, Finished, Usage
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.engines.event_buffer import EventBufferConfig
from loraplex.platform.ray import routed_request
from loraplex.platform.ray.engine import RayEngine
from loraplex.platform.ray.messages import Accepted, Placing, ReplicaReport, decode_placing, encode
from loraplex.platform.ray.replica_directory import ReplicaDirectory
from loraplex.platform.ray.replica_set import ReplicaSet

REQUEST = EngineRequest(
    request_id="r", namespace=b"n" * 32, prompt_token_ids=[1], sampling=SamplingParams(max_tokens=4)
)
TOKEN = Delta("r", 0, [7], "x")


class Response:
    """A stream of replies that a test writes: an exception in it is raised, and None ends it."""

    def __init__(self) -> None:
        self.replies: asyncio.Queue[object] = asyncio.Queue()
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        # A little later, as by the thread of Serve's router.
        asyncio.get_running_loop().call_later(0.001, self.replies.put_nowait, TaskCancelledError())

    def end_with(self, reply: object) -> None:
        self.replies.put_nowait(reply)
        self.replies.put_nowait(None)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._read()

    async def _read(self) -> AsyncIterator[bytes]:
        while (reply := await self.replies.get()) is not None:
            if isinstance(reply, Exception):
                raise reply
            yield encode(reply)


class Handle:
    """Serve's handle: `response` is the stream of the next request, `aborts` the ids that were sent to all replicas.

    `placings` are those of the requests that were sent.
    """

    def __init__(self) -> None:
        self.response = Response()
        self.placings: list[Placing] = []
        self.aborts: list[list[str]] = []
        self.on_abort: Callable[[], object] = lambda: None

    def remote(self, _: bytes, placing: bytes, waited_s: float) -> Response:
        self.placings.append(decode_placing(placing))
        return self.response

    def broadcast(self, method: str, ids: list[str]) -> "Handle":
        assert method == "abort"
        self.aborts.append(ids)
        self.on_abort()
        return self

    async def results_async(self, **_: object) -> list[object]:
        return []


class World:
    """An engine with one replica, `a`, whose reader has read the first token."""

    def __init__(self) -> None:
        self.handle, self.directory = Handle(), ReplicaDirectory()
        report = ReplicaReport(info=DEFAULT_INFO, stats=EngineStats(), at=datetime.now(UTC))
        self.directory.reports = {"a": report}
        self.deaths: list[Any] = []
        replicas = ReplicaSet(self.directory, self.deaths.append)
        replicas.update()
        self.engine = RayEngine(replicas, EventBufferConfig(tokens=100, stall_s=60.0), lambda _: None)
        self.engine.connect(self.handle)  # type: ignore[arg-type]  # what the engine uses of it

    def begin(self, *replies: object, **deadlines: float) -> "asyncio.Task[list[Event]]":
        for reply in replies:
            self.handle.response.replies.put_nowait(reply)
        return asyncio.create_task(self._collect(replace(REQUEST, **deadlines)))

    async def _collect(self, request: EngineRequest) -> list[Event]:
        return [event async for event in self.engine.submit(request)]

    async def begun(self) -> None:
        while not self.handle.response.replies.empty() or not self.engine.open_requests:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)


@pytest.fixture
def world() -> World:
    return World()


async def test_a_gateway_that_shuts_down_says_so(world: World) -> None:
    reading = world.begin(Accepted("a"), [TOKEN])
    await world.begun()
    finished = Finished("r", 0, "abort", Usage(1, 0, 1))
    world.handle.on_abort = lambda: world.handle.response.end_with([finished])
    world.engine.fail_open("the time for its drain is over")
    last = (await reading)[-1]
    assert isinstance(last, Failed)
    assert (last.code, last.usage) == ("server_shutting_down", {0: Usage(1, 0, 1)})
    await world.engine.drain()
    (refused,) = await world.begin()
    assert isinstance(refused, Failed) and refused.code == "server_shutting_down"


async def test_an_abort_on_a_replica_that_drains_cancels_its_stream(world: World) -> None:
    reading = world.begin(Accepted("a"), [TOKEN])
    await world.begun()
    world.directory.reports = {}
    async with asyncio.timeout(20):
        await world.engine.abort("r")
        token, last = await reading
    assert world.handle.response.cancelled
    assert token == TOKEN
    assert isinstance(last, Failed) and last.code == "engine_lost"


async def test_an_abort_on_a_replica_that_takes_calls_is_sent_and_has_its_usage(world: World) -> None:
    reading = world.begin(Accepted("a"), [TOKEN])
    await world.begun()
    finished = Finished("r", 0, "abort", Usage(1, 0, 1))
    world.handle.on_abort = lambda: world.handle.response.end_with([finished])
    async with asyncio.timeout(20):
        await world.engine.abort("r")
    assert (await reading)[-1] == finished
    assert world.handle.aborts == [["r"]]
    assert not world.handle.response.cancelled


async def test_an_abort_that_has_ended_at_once_is_sent_nowhere(world: World) -> None:
    reading = world.begin()
    await world.begun()
    async with asyncio.timeout(20):
        await world.engine.abort("r")
        await reading
        sending = world.engine._aborts.sending
        assert sending is not None
        await sending
    assert world.handle.aborts == []


async def test_a_replica_that_dies_with_an_aborted_request_has_lost_it(world: World) -> None:
    reading = world.begin(Accepted("a"), [TOKEN])
    await world.begun()
    world.handle.on_abort = lambda: world.handle.response.replies.put_nowait(ActorDiedError())
    async with asyncio.timeout(20):
        await world.engine.abort("r")
    last = (await reading)[-1]
    assert isinstance(last, Failed) and last.code == "engine_lost"
    assert world.engine._replicas.not_ready() == ["a"]


async def failed(reading: "asyncio.Task[list[Event]]") -> Failed:
    async with asyncio.timeout(20):
        last = (await reading)[-1]
    assert isinstance(last, Failed)
    return last


@pytest.mark.parametrize("deadline", ["first_token_timeout_s", "total_timeout_s"])
async def test_a_time_counts_while_a_request_waits_for_a_replica(world: World, deadline: str) -> None:
    last = await failed(world.begin(**{deadline: 0.02}))
    assert (last.code, last.message) == ("timeout", f"the request's `{deadline}` has passed")
    assert world.handle.response.cancelled


async def test_a_request_that_finds_no_replica_within_its_queue_time_is_refused_as_by_an_engine(
    world: World,
) -> None:
    assert (await failed(world.begin(queue_timeout_s=0.02))).code == "overloaded"
    assert world.handle.response.cancelled


async def test_a_first_token_that_is_late_on_a_replica_ends_the_request_there(world: World) -> None:
    world.handle.on_abort = lambda: world.handle.response.end_with(
        [Finished("r", 0, "abort", Usage(1, 0, 0))]
    )
    last = await failed(world.begin(Accepted("a"), first_token_timeout_s=0.2))
    assert (last.code, last.usage) == ("timeout", {0: Usage(1, 0, 0)})
    assert world.handle.aborts == [["r"]]


async def test_a_request_with_a_first_token_has_all_of_its_time(world: World) -> None:
    reading = world.begin(Accepted("a"), [TOKEN], first_token_timeout_s=1.0)
    await world.begun()
    await asyncio.sleep(1.1)
    world.handle.response.end_with([Finished("r", 0, "length", Usage(1, 0, 1))])
    async with asyncio.timeout(20):
        assert isinstance((await reading)[-1], Finished)
    assert world.handle.aborts == []


async def test_the_total_time_ends_a_request_on_its_replica_with_its_usage(world: World) -> None:
    finished = Finished("r", 0, "abort", Usage(1, 0, 1))
    world.handle.on_abort = lambda: world.handle.response.end_with([finished])
    last = await failed(world.begin(Accepted("a"), [TOKEN], total_timeout_s=0.02))
    assert (last.code, last.usage) == ("timeout", {0: Usage(1, 0, 1)})
    assert world.handle.aborts == [["r"]]


async def test_a_replica_that_does_not_end_a_request_does_not_hold_its_reader(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed_request, "ENDING_S", 0.02)
    assert (await failed(world.begin(Accepted("a"), [TOKEN], total_timeout_s=0.02))).code == "timeout"
    await world.engine.close()


async def test_a_second_replica_gets_what_is_left_of_the_deadlines(world: World) -> None:
    refused = Failed("r", "engine_unavailable", "it restarts")
    reading = world.begin(Accepted("a"), [refused], Accepted("b"), [refused])
    assert (await failed(reading)).code == "engine_unavailable"
    first, second = world.handle.placings
    assert first.since == second.since > 0.0
    assert second.avoid == ["a"]
