"""The replicas as one gateway sees them: who takes requests, what each last reported, and which requests died with one.

Invariant: a death is reported once, with the requests of this gateway that it ended. A replica that drains is no death.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final

from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.messages import EngineInfo, EngineStats
from loraplex.platform.engines.poison_memory import Work
from loraplex.platform.engines.remote_client import OnDeath
from loraplex.platform.ray.merged_stats import merged_stats
from loraplex.platform.ray.messages import ReplicaReport
from loraplex.platform.ray.replica_directory import ReplicaDirectory

FOLLOW_S: Final = 0.1
GATHER_S: Final = 0.5
"""The streams of a dead replica end within this time of each other."""
VACANT_S: Final = 60.0
"""A place that no replacement takes for so long is given up: the deployment was scaled down."""


class ReplicaView:
    """The place of one replica, with the names of `ManagedEngine`. A replacement takes the place of a lost replica."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._earlier_restarts = 0
        self.device: str | None = None
        self.replica_id: str | None = None
        self.report: ReplicaReport | None = None
        self.left_at = clock()
        self.deaths = 0

    @property
    def address(self) -> str:
        """The replica's id; empty while the place is vacant."""
        return self.replica_id or ""

    @property
    def connected(self) -> bool:
        """Whether Serve lists the replica and its engine runs."""
        return self.replica_id is not None and self.last_stats is not None

    @property
    def open_requests(self) -> int:
        """Running and waiting requests of all gateways."""
        stats = self.last_stats
        return 0 if stats is None else stats.running + stats.waiting

    @property
    def last_stats(self) -> EngineStats | None:
        return None if self.replica_id is None else self.known_stats

    @property
    def known_stats(self) -> EngineStats | None:
        return None if self.report is None else self.report.stats

    @property
    def known_at(self) -> datetime | None:
        return None if self.report is None else self.report.at

    @property
    def restarts(self) -> int:
        return self._earlier_restarts + (0 if self.report is None else self.report.restarts)

    @property
    def failure(self) -> str | None:
        if self.replica_id is None:
            return "its replica ended"
        return None if self.report is None else self.report.failure

    def silent_for(self) -> float:
        """Seconds since Serve listed the replica. Serve checks the health of those it lists."""
        return 0.0 if self.replica_id is not None else self._clock() - self.left_at

    def info(self) -> EngineInfo:
        if self.report is None:
            raise EngineUnavailable("the replica has not reported yet")
        return self.report.info

    def take(self, replica_id: str) -> None:
        """Put a replica in this place; replacing another one counts as a restart."""
        self._earlier_restarts = self.restarts + (self.report is not None)
        self.replica_id, self.report = replica_id, None

    def leave(self) -> None:
        """The replica takes no more requests: it drains, or has died."""
        self.replica_id, self.left_at = None, self._clock()


class ReplicaSet:
    """Follows a `ReplicaDirectory`. `views` are the places by their number; `info` is that of the newest report."""

    def __init__(
        self, directory: ReplicaDirectory, on_death: OnDeath, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._on_death = on_death
        self._clock = clock
        self._lost: dict[str, dict[str, Work]] = {}
        self._lost_at: dict[str, float] = {}
        self._places: dict[str, ReplicaView] = {}
        self._changed = asyncio.Event()
        self.views: dict[int, ReplicaView] = {}
        self.info: EngineInfo | None = None

    async def follow(self) -> None:
        """Read the directory until cancelled."""
        while True:
            self.update()
            await asyncio.sleep(FOLLOW_S)

    def update(self) -> None:
        """Read the directory once."""
        reports = self._directory.reports
        for view in self.views.values():
            if view.replica_id is not None and view.replica_id not in reports:
                view.leave()
        for replica_id, report in reports.items():
            view = self._place(replica_id)
            if report is not None and report is not view.report:
                self._read(replica_id, view, report)
        self._count_ended(reports)
        self._give_up_vacant()
        self._changed.set()

    async def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait until `is_so`, which is asked after each update."""
        while not is_so():
            self._changed.clear()
            await self._changed.wait()

    def lists(self, replica_id: str) -> bool:
        """Whether Serve sends calls to the replica."""
        return replica_id in self._directory.reports

    def not_ready(self) -> list[str]:
        """The listed replicas whose engine was lost and has not been replaced yet."""
        return list(self._lost)

    def lost(self, replica_id: str, work: Work) -> None:
        """Note that the engine of a replica was lost while it had this work."""
        key = getattr(work, "request_id", None) or work.digest  # type: ignore[union-attr]
        self._lost.setdefault(replica_id, {})[key] = work
        self._lost_at.setdefault(replica_id, self._clock())

    def merged_stats(self) -> EngineStats | None:
        """The sums of what the connected replicas reported; None without one."""
        stats = [view.last_stats for view in self.views.values() if view.last_stats is not None]
        return merged_stats(stats) if stats else None

    def _place(self, replica_id: str) -> ReplicaView:
        """The place of a replica: its own, that of a lost one, or a new one."""
        view = self._places.get(replica_id)
        if view is not None and view.replica_id == replica_id:
            return view
        number = next(
            (number for number, each in sorted(self.views.items()) if each.replica_id is None),
            next(each for each in range(len(self.views) + 1) if each not in self.views),
        )
        view = self._places[replica_id] = self.views.setdefault(number, ReplicaView(self._clock))
        view.take(replica_id)
        return view

    def _read(self, replica_id: str, view: ReplicaView, report: ReplicaReport) -> None:
        died = report.deaths > (0 if view.report is None else view.report.deaths)
        view.report, self.info = report, report.info
        if died:
            self._report_death(replica_id)

    def _count_ended(self, reports: Mapping[str, ReplicaReport | None]) -> None:
        """Report the deaths of replicas that are listed no more."""
        for replica_id, lost_at in list(self._lost_at.items()):
            if replica_id not in reports and self._clock() - lost_at >= GATHER_S:
                self._report_death(replica_id)

    def _report_death(self, replica_id: str) -> None:
        self._lost_at.pop(replica_id, None)
        view = self._places.get(replica_id)
        if view is not None:
            view.deaths += 1
        self._on_death(list(self._lost.pop(replica_id, {}).values()))

    def _give_up_vacant(self) -> None:
        for number, view in list(self.views.items()):
            if view.replica_id is None and view.silent_for() >= VACANT_S:
                del self.views[number]
        known = {id(view) for view in self.views.values()}
        self._places = {name: view for name, view in self._places.items() if id(view) in known}
