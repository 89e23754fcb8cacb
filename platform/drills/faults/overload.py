"""`overload`: a tenant of a lower tier offers what makes twice the capacity, together with a tenant of a higher tier.

Invariant: rates follow from the capacity measured just before, so that the higher tier asks for less than its share.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from loraplex.platform.bench.latency_metrics import percentile
from loraplex.platform.drills.drill_tenant import TENANT_NAME, DrillTenant, DrillTenantTerms
from loraplex.platform.drills.errors import DrillImpossible
from loraplex.platform.drills.faults.fault import Fault, Observed
from loraplex.platform.drills.ledger_drift import measure_drift
from loraplex.platform.drills.report import Promise
from loraplex.platform.drills.traffic import (
    MAX_OPEN,
    MAX_PROMPT_TOKENS,
    TIMEOUT_S,
    DrillLoad,
    RequestOutcome,
    Traffic,
)
from loraplex.tenants.database import Database

LOWER_NAME: Final = f"{TENANT_NAME}-lower"
HIGHER_WEIGHT: Final = 4.0
HIGHER_SHARE: Final = 0.4
"""Of the capacity: half of what its weight gives it."""
OFFERED: Final = 2.0
LOWER_AT_ONCE: Final = MAX_OPEN // 4
CAPACITY_S: Final = 10.0
LEAD_S: Final = 3.0
"""Until the lower tier has filled what it may have in progress."""
MAX_CAPACITY: Final = 100.0
"""Requests per second that this command can offer twice without being late itself."""
MAX_RATIO: Final = 1.2
MIN_SAMPLES: Final = 10
"""First tokens of each half: the 95th percentile of fewer says nothing."""
SHIPPED_S: Final = 60.0
REFUSALS: Final = (429, 503)


@dataclass(slots=True, kw_only=True)
class Overload(Fault):
    """`seconds`: the capacity, then the higher tier alone, then both."""

    name: ClassVar[str] = "overload"
    allowed_errors: ClassVar[frozenset[str]] = frozenset()
    # The capacity and the lower tier are ended each by waiting for their last requests.
    more_s: ClassVar[float] = CAPACITY_S + 2 * TIMEOUT_S + SHIPPED_S

    capacity: float = 0.0
    over_s: float = 0.0
    """When the lower tier began."""
    _lower: list[Traffic] = field(default_factory=list)
    _tenants: Sequence[DrillTenant] = ()

    @staticmethod
    def seconds_of(phase_s: float) -> float:
        """All that the fault takes, with `phase_s` for each of its two halves."""
        return 2 * phase_s + LEAD_S

    @property
    def phase_s(self) -> float:
        return (self.seconds - LEAD_S) / 2

    def plan(self) -> str:
        rows = self.installation.settings.max_num_seqs
        fill = "fill" if rows <= LOWER_AT_ONCE else "do not fill"
        return (
            f"measure for {CAPACITY_S:g} s how many requests per second are served, and then offer {OFFERED:g} x as many for "
            f"{self.phase_s:g} s, of two tenants whose weights are {HIGHER_WEIGHT:g} and 1. The lower tier's limit "
            f"of {LOWER_AT_ONCE} sequences at once refuses what is beyond; these {fill} the {rows} of the engine. Requests of "
            "OTHER tenants wait longer meanwhile, and may be refused."
        )

    def tenants(self, load: DrillLoad, longest_s: float) -> Sequence[DrillTenantTerms]:
        tokens = math.ceil(longest_s * MAX_CAPACITY) * (MAX_PROMPT_TOKENS + load.max_tokens)
        return [
            DrillTenantTerms(weight=HIGHER_WEIGHT, concurrent_requests=MAX_OPEN, tokens=tokens),
            DrillTenantTerms(name=LOWER_NAME, concurrent_requests=LOWER_AT_ONCE, tokens=tokens),
        ]

    async def prepare(self, tenants: Sequence[DrillTenant], model: str, load: DrillLoad) -> DrillLoad:
        self._tenants = tenants
        began_s = time.monotonic()
        backlog = self._traffic(model, load, 10 * MAX_CAPACITY, LOWER_AT_ONCE)
        async with backlog:
            await asyncio.sleep(CAPACITY_S)
        if backlog.errors or not backlog.outcomes:
            raise DrillImpossible(f"requests are not served even without overload: {dict(backlog.errors)}")
        # With those in progress after `CAPACITY_S`: a slow machine ends none before.
        took_s = max(each.ended_s for each in backlog.outcomes) - began_s
        self.capacity = len(backlog.outcomes) / took_s
        if self.capacity > MAX_CAPACITY:
            raise DrillImpossible(
                f"{self.capacity:.1f} requests per second are served: at most {MAX_CAPACITY:g} can be overloaded from here; "
                "--max-tokens makes them longer"
            )
        rate = HIGHER_SHARE * self.capacity
        self._traffic(model, load, OFFERED * self.capacity - rate, MAX_OPEN)
        self.notes.append(
            f"{self.capacity:.1f} requests per second are served; the higher tier sends {rate:.1f} of them"
        )
        return replace(load, rate_per_s=rate, stream_share=1.0)

    def _traffic(self, model: str, load: DrillLoad, rate_per_s: float, max_open: int) -> Traffic:
        """Requests of the lower tier, which are kept for the comparison with the ledger."""
        urls, api_key = self.installation.base_urls, self._tenants[1].api_key
        self._lower.append(Traffic(urls, api_key, model, rate_per_s, load.max_tokens, max_open=max_open))
        return self._lower[-1]

    async def begin(self) -> None:
        """Let the higher tier be alone for a while."""
        await asyncio.sleep(self.phase_s)

    async def last(self, outcomes: Sequence[RequestOutcome]) -> None:
        self.over_s = time.monotonic()
        async with self._lower[-1]:
            await asyncio.sleep(LEAD_S + self.phase_s)

    async def promises(self, observed: Observed) -> list[Promise]:
        alone = _first_tokens(observed.outcomes, observed.began_s, self.over_s)
        loaded_s = self.over_s + LEAD_S
        beside = _first_tokens(observed.outcomes, loaded_s, loaded_s + self.phase_s)
        offered = self._lower[-1].outcomes
        refused = [each for each in offered if each.status in REFUSALS]
        named = [each for each in refused if each.retry_after]
        lost = Counter(each.code for each in offered if not each.complete and each.status not in REFUSALS)
        return [
            _waits_no_longer(alone, beside),
            Promise(
                "the lower tier gets 429 or 503 with Retry-After",
                0 < len(refused) == len(named),
                f"{len(refused)} of {len(offered)} refused, {len(named)} with Retry-After",
            ),
            Promise("nothing of the lower tier is lost", not lost, str(dict(lost) or "nothing")),
            await self._charged(),
        ]

    async def _charged(self) -> Promise:
        database = Database(self.installation.database_url, pool_size=1)
        outcomes = [each for traffic in self._lower for each in traffic.outcomes]
        try:
            drift = await measure_drift(database, self._tenants[1].tenant_id, outcomes, SHIPPED_S)
        finally:
            await database.close()
        found = f"{drift.drift_pico} pico-units, {drift.drift_tokens} tokens"
        return Promise("the lower tier is charged for what it got: drift 0", drift.is_zero, found)


def _first_tokens(outcomes: Sequence[RequestOutcome], since_s: float, until_s: float) -> list[float]:
    """The times to first token of requests that began within."""
    return [
        each.first_token_s
        for each in outcomes
        if each.first_token_s is not None and since_s <= each.started_s < until_s
    ]


def _waits_no_longer(alone: Sequence[float], beside: Sequence[float]) -> Promise:
    name = f"the higher tier's p95 TTFT is at most {MAX_RATIO:g} x of alone"
    if min(len(alone), len(beside)) < MIN_SAMPLES:
        found = f"{len(beside)} first tokens, alone {len(alone)}: at least {MIN_SAMPLES} of each are compared"
        return Promise(name, False, f"{found}; --seconds makes them more")
    before_s, then_s = percentile(alone, 95), percentile(beside, 95)
    found = f"{1000 * then_s:.0f} ms, alone {1000 * before_s:.0f} ms: {then_s / before_s:.2f} x"
    return Promise(name, then_s <= MAX_RATIO * before_s, found)
