"""Counts the current minute of each engine of one gateway, for `engine_minutes`.

Invariant: a minute of an engine that did not answer in it is missing, never zero.
"""

import socket
from collections import defaultdict
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from loraplex.engine.messages import EngineStats
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.observability.request_record import FinishedRequest
from loraplex.tenants.engine_minutes.records import EngineMinute
from loraplex.tenants.ledger.histograms import BUCKETS, TTFT_BOUNDS_MS, added, bucket_of

PEAKS: Final = ("running", "waiting", "referenced_blocks", "total_blocks")
MINUTE: Final = timedelta(minutes=1)
COUNTERS: Final = ("prompt_tokens", "generation_tokens")


class EngineMinutes:
    """The minutes of the engines of `gateway`. `observe` sees each request that has ended; `sample` looks at the engines."""

    def __init__(self, engines: EnginePool, gateway: UUID) -> None:
        self._engines, self._gateway, self._host = engines, gateway, socket.gethostname()
        self._minute: datetime | None = None
        self._before: dict[int, EngineStats] = {}
        self._newest: dict[int, EngineStats] = {}
        self._peaks: dict[int, dict[str, int]] = {}
        self._ttft: dict[str, list[int]] = defaultdict(lambda: [0] * BUCKETS)
        self._gaps: dict[str, list[int]] = defaultdict(lambda: [0] * BUCKETS)

    def observe(self, finished: FinishedRequest) -> None:
        """Count the first token and the gaps of a request. A `RequestObserver`."""
        stats = finished.record.stats
        if stats is None or stats.first_token is None:
            return
        engine = stats.engine or "0"
        self._ttft[engine][bucket_of(TTFT_BOUNDS_MS, (stats.first_token - stats.arrival) * 1000)] += 1
        self._gaps[engine] = added((self._gaps[engine], stats.gap_buckets))

    def sample(self, now: datetime) -> list[EngineMinute]:
        """Look at the engines, and return the minute that has ended since the last look, if one has."""
        minute = now.replace(second=0, microsecond=0)
        ended = [] if self._minute in (None, minute) else self._close(self._minute)
        if self._minute is not None and minute - self._minute > MINUTE:
            # What engines counted in a minute without a look belongs to no other one.
            self._before = {}
        self._minute = minute
        for number, engine in self._engines.observed().items():
            stats = engine.last_stats
            if stats is not None:
                self._newest[number] = stats
                self._before.setdefault(number, stats)
                peaks = self._peaks.setdefault(number, dict.fromkeys(PEAKS, 0))
                self._peaks[number] = {name: max(peaks[name], getattr(stats, name)) for name in PEAKS}
        return ended

    def _close(self, minute: datetime) -> list[EngineMinute]:
        addresses = {number: each.address for number, each in self._engines.observed().items()}
        ended = [
            EngineMinute(
                minute=minute,
                gateway=self._gateway,
                number=number,
                host=self._host,
                address=addresses.get(number, ""),
                device_adapters=len(stats.resident_adapters),
                host_adapters=len(stats.host_adapters),
                ttft_buckets=tuple(self._ttft[str(number)]),
                gap_buckets=tuple(self._gaps[str(number)]),
                **self._peaks[number],
                **{name: _grown(name, self._before[number], stats) for name in COUNTERS},
            )
            for number, stats in self._newest.items()
        ]
        self._before, self._newest = self._newest, {}
        for counted in (self._peaks, self._ttft, self._gaps):
            counted.clear()
        return ended


def _grown(name: str, before: EngineStats, after: EngineStats) -> int:
    """By how much a counter grew. One that is smaller has begun again, with its engine."""
    old, new = getattr(before, name), getattr(after, name)
    return int(new - old if new >= old else new)
