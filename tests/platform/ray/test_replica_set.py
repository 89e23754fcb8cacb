"""Replicas as a gateway sees them: places that a replacement takes over, and deaths with what was open."""

from datetime import UTC, datetime

import pytest

from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.fake_engine import DEFAULT_INFO
from loraplex.engine.messages import EngineRequest, EngineStats
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.engines.poison_memory import Work
from loraplex.platform.ray.messages import ReplicaReport
from loraplex.platform.ray.replica_directory import ReplicaDirectory
from loraplex.platform.ray.replica_set import GATHER_S, VACANT_S, ReplicaSet

WORK = EngineRequest(
    request_id="r", namespace=b"n" * 32, prompt_token_ids=[1], sampling=SamplingParams(max_tokens=4)
)


def report(running: int = 0, deaths: int = 0, *, ready: bool = True, restarts: int = 0) -> ReplicaReport:
    stats = EngineStats(running=running) if ready else None
    return ReplicaReport(
        info=DEFAULT_INFO, stats=stats, at=datetime.now(UTC), deaths=deaths, restarts=restarts
    )


class World:
    """A directory that a test writes, a clock that it sets, and the deaths that were reported."""

    def __init__(self) -> None:
        self.now = 0.0
        self.deaths: list[list[Work]] = []
        self.directory = ReplicaDirectory()
        self.replicas = ReplicaSet(
            self.directory, lambda works: self.deaths.append(list(works)), lambda: self.now
        )

    def show(self, **reports: ReplicaReport | None) -> None:
        self.directory.reports = reports
        self.replicas.update()


@pytest.fixture
def world() -> World:
    return World()


def test_a_replica_is_connected_once_its_engine_reports(world: World) -> None:
    world.show(a=None, b=report(ready=False), c=report(running=2))
    assert [view.connected for view in world.replicas.views.values()] == [False, False, True]
    with pytest.raises(EngineUnavailable):
        world.replicas.views[0].info()
    merged = world.replicas.merged_stats()
    assert merged is not None
    assert merged.running == 2


def test_a_replacement_takes_the_number_and_counts_as_a_restart(world: World) -> None:
    world.show(a=report(), b=report(restarts=2))
    world.show(a=report())
    assert world.replicas.views[1].failure == "its replica ended"
    world.show(a=report(), c=report())
    assert (world.replicas.views[1].replica_id, world.replicas.views[1].restarts) == ("c", 3)
    assert world.deaths == []


def test_a_place_without_a_replacement_is_given_up_after_a_while(world: World) -> None:
    world.show(a=report(), b=report())
    world.show(b=report())
    world.now = VACANT_S - 1
    world.show(b=report())
    assert list(world.replicas.views) == [0, 1]
    world.now = VACANT_S
    world.show(b=report())
    assert list(world.replicas.views) == [1]


def test_an_engine_that_was_replaced_in_its_replica_died_with_what_was_lost(world: World) -> None:
    world.show(a=report())
    world.replicas.lost("a", WORK)
    assert world.replicas.not_ready() == ["a"]
    world.show(a=report(ready=False))
    assert world.deaths == []
    world.show(a=report(deaths=1))
    assert world.deaths == [[WORK]]
    assert world.replicas.not_ready() == []
    assert world.replicas.views[0].deaths == 1


def test_a_replica_that_is_gone_died_once_its_streams_have_ended(world: World) -> None:
    world.show(a=report(), b=report())
    world.replicas.lost("a", WORK)
    world.show(b=report())
    assert world.deaths == []
    world.now = GATHER_S
    world.show(b=report())
    world.show(b=report(running=1))
    assert world.deaths == [[WORK]]


def test_a_replica_that_drained_is_no_death(world: World) -> None:
    world.show(a=report(), b=report())
    world.show(b=report())
    world.now = 10.0
    world.show(b=report())
    assert world.deaths == []
