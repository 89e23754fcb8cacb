"""A fake engine whose health a test sets; satisfies `ManagedEngine`."""

from datetime import datetime

from loraplex.engine.fake_engine import FakeEngine, FakeScript
from loraplex.engine.messages import EngineStats


class Managed(FakeEngine):
    """A fake engine whose health a test sets."""

    def __init__(self, script: FakeScript | None = None) -> None:
        super().__init__(script)
        self.address = "ipc:///managed"
        self.device: str | None = None
        self.connected = True
        self.last_stats: EngineStats | None = None
        self.known_stats: EngineStats | None = None
        self.known_at: datetime | None = None
        self.restarts = 0
        self.deaths = 0
        self.failure: str | None = None
        self.extra_load = 0
        self.failed_open: list[str] = []

    @property
    def open_requests(self) -> int:
        return self.running + self.extra_load

    def silent_for(self) -> float:
        return 0.0

    def fail_open(self, reason: str) -> None:
        self.failed_open.append(reason)
