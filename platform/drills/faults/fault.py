"""What every fault of a drill has: a plan in words, a begin, an end, and the errors that the product promises under it.

Invariant: `check` changes nothing, and all that `begin` changes is in `undo`, which is safe before `begin`, too.
"""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from loraplex.platform.drills.drill_tenant import DrillTenant, DrillTenantTerms
from loraplex.platform.drills.installation import Installation
from loraplex.platform.drills.ledger_drift import LedgerDrift
from loraplex.platform.drills.report import Promise
from loraplex.platform.drills.traffic import MAX_OPEN, MAX_PROMPT_TOKENS, DrillLoad, RequestOutcome
from loraplex.platform.drills.undo import Undo

SHOWN_S: Final = 60.0
POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Observed:
    """What a drill saw. Times are in seconds of `time.monotonic`. `drift` None: the ledger could not be read."""

    outcomes: Sequence[RequestOutcome]
    began_s: float
    ended_s: float
    drift: LedgerDrift | None

    @property
    def served_meanwhile(self) -> int:
        """Requests that began and were answered in full while the fault lasted."""
        return sum(
            each.complete and each.started_s >= self.began_s and each.ended_s <= self.ended_s
            for each in self.outcomes
        )


@dataclass(slots=True, kw_only=True)
class Fault(ABC):
    """A fault of an installation that lasts at most `seconds`, unless its class says otherwise."""

    name: ClassVar[str]
    allowed_errors: ClassVar[frozenset[str]]
    """Codes of errors that clients may get; each other one breaks a promise."""
    charges_all: ClassVar[bool] = True
    """Whether every token that a client received is charged, also of a response that broke off."""
    more_s: ClassVar[float] = SHOWN_S
    """The longest that the fault waits besides `seconds`."""

    installation: Installation
    seconds: float
    notes: list[str] = field(default_factory=list)
    """What the report says besides its figures."""

    async def check(self) -> None:
        """Raise `DrillImpossible` if the fault cannot be made here."""

    @abstractmethod
    def plan(self) -> str:
        """Say exactly what will be done, to whom it happens, and how it ends. Called after `check`."""

    def undo(self) -> Undo | None:
        """What takes the fault back, also if this process is killed. None: there is nothing to take back."""
        return None

    def tenants(self, load: DrillLoad, longest_s: float) -> Sequence[DrillTenantTerms]:
        """The tenants of the drill; the first one sends the requests of `load`. Their limits are above what they can use."""
        tokens = math.ceil(longest_s * load.rate_per_s) * (MAX_PROMPT_TOKENS + load.max_tokens)
        return [DrillTenantTerms(concurrent_requests=MAX_OPEN, tokens=tokens)]

    async def prepare(self, tenants: Sequence[DrillTenant], model: str, load: DrillLoad) -> DrillLoad:
        """Return the load of the first tenant, before any of it is sent. Raises `DrillImpossible`."""
        return load

    @abstractmethod
    async def begin(self) -> None:
        """Make the fault. Raises `DrillImpossible`, and whatever the system says."""

    async def last(self, outcomes: Sequence[RequestOutcome]) -> None:
        """Return when the fault has lasted long enough. `outcomes` grows meanwhile.

        On a busy machine that is until it has shown in them, at most `SHOWN_S` longer.
        """
        await asyncio.sleep(self.seconds)
        deadline = time.monotonic() + SHOWN_S
        while not self.has_shown(outcomes) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    def has_shown(self, outcomes: Sequence[RequestOutcome]) -> bool:
        """Whether some request met the fault while it lasted."""
        return True

    async def promises(self, observed: Observed) -> list[Promise]:
        """What this fault must show besides what all of them must."""
        return []
