"""The states in which this gateway refuses what it is asked for, with one log line at the begin and one at the end of each.

Invariant: a state holds from the moment it is seen until it was not seen for `HYSTERESIS_S`, so that readiness does not flap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

HYSTERESIS_S: Final = 2.0
LOG = structlog.get_logger("loraplex.health")

Reasons = Mapping[str, Sequence[str]]
"""Why each state holds, by its name, such as `journal`."""


@dataclass(slots=True)
class _Held:
    began: float
    seen: float
    reasons: Sequence[str]


@dataclass(slots=True)
class RefusingStates:
    """`refused`: what they refuse, for people."""

    refused: str
    _held: dict[str, _Held] = field(default_factory=dict, init=False)

    def observe(self, found: Reasons, now: float) -> list[str]:
        """Take what holds at `now`, a time of one clock; return the reasons of all states that hold."""
        for state, reasons in found.items():
            held = self._held.get(state)
            if held is None:
                LOG.warning(f"refusing {self.refused}", state=state, reasons=list(reasons))
                self._held[state] = _Held(now, now, reasons)
            else:
                held.seen, held.reasons = now, reasons
        for state in [name for name, held in self._held.items() if now - held.seen >= HYSTERESIS_S]:
            held = self._held.pop(state)
            LOG.info(f"not refusing {self.refused} any more", state=state, seconds=round(now - held.began, 1))
        return [reason for held in self._held.values() for reason in held.reasons]
