"""Compares the ledger with its sums for ever: the newest hours in each round, everything older in turn.

Invariant: it works a tenth of the time at most and changes nothing. One gateway of an installation compares at a time.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Final

import structlog

from loraplex.platform.observability.billing_metrics import BillingMetrics
from loraplex.tenants.database import Database
from loraplex.tenants.ledger.drift import (
    ALONE,
    HOUR,
    ComparedRange,
    Comparison,
    comparable_ranges,
    compare,
    newest_ranges,
)
from loraplex.tenants.repetition import attempt

INTERVAL_S: Final = 60.0
ROUND_S: Final = 2.0
"""After so long a round begins no further comparison; each is bounded by the statement timeout of the database."""
REST: Final = 9
MAX_REPEATED: Final = 20
"""Ranges with differences that a round compares again; others wait for their turn."""
LOG = structlog.get_logger("loraplex.usage_reconciliation")


@dataclass(slots=True, kw_only=True)
class UsageReconciliation:
    """The comparisons of one gateway; `run` runs until it is cancelled."""

    database: Database
    recorder: BillingMetrics
    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))
    _waiting: deque[ComparedRange] = field(default_factory=deque)
    _drifting: dict[ComparedRange, Comparison] = field(default_factory=dict)

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            begun = clock()
            await attempt(LOG, self.round(), "comparing usage failed", work="usage comparison")
            await asyncio.sleep(max(INTERVAL_S, REST * (clock() - begun)))

    async def round(self) -> None:
        """Compare the newest hours, what differed before, then older ranges in turn. Raises `DatabaseUnavailable`."""
        clock = asyncio.get_running_loop().time
        end = clock() + ROUND_S
        repeated = islice(self._drifting, MAX_REPEATED)
        for part in dict.fromkeys((*newest_ranges(self.now()), *repeated)):
            if not await self._compare(part):
                return
        if not self._waiting:
            async with self.database.as_operator() as session:
                self._waiting.extend(await comparable_ranges(session, self.now(), HOUR))
        while self._waiting and clock() < end:
            if not await self._compare(self._waiting.popleft()):
                return

    async def _compare(self, part: ComparedRange) -> bool:
        """False if another gateway compares now."""
        async with self.database.as_operator() as session:
            if not await session.scalar(ALONE):
                return False
            found = await compare(session, part)
        self._note(found)
        return True

    def _note(self, found: Comparison) -> None:
        before = self._drifting.pop(found.part, None)
        if found.differing:
            self._drifting[found.part] = found
            if before != found:
                LOG.error(
                    "sums of usage differ from the ledger",
                    compared=str(found.part),
                    drift_pico=found.drift_pico,
                    differing=found.differing,
                    named=[*found.named],
                )
        elif before is not None:
            LOG.warning("sums of usage agree with the ledger again", compared=str(found.part))
        same = [each for part, each in self._drifting.items() if part.store == found.part.store]
        drift = sum(each.drift_pico for each in same)
        self.recorder.drifted(found.part.store, drift, sum(each.differing for each in same))
