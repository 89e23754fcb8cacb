"""Measures admissions for a recorder, such as metrics. Invariant: what is recorded names outcomes, limits and levels, never a tenant."""

import time
from types import TracebackType
from typing import Final, Self

from loraplex.tenants.errors import (
    LimitExceeded,
    PolicyStale,
    PriceMissing,
    QuotaExhausted,
    StoreUnavailable,
)
from loraplex.tenants.quotas.reservation import OnProvisional

NONE: Final = "none"
DECISIONS: Final = {PolicyStale: "stale", StoreUnavailable: "unavailable", PriceMissing: "unpriced"}


class AdmissionRecorder:
    """Receives what admission decides and what settled requests used; this one ignores it. Times in seconds."""

    def decided(self, decision: str, seconds: float, limit: str = NONE, level: str = NONE) -> None:
        """Record a decision `seconds` after its request, and the limit that refused it."""

    def ledger_written(self, seconds: float) -> None:
        """Record a reservation that is in the ledger, `seconds` after its request. The response is not sent earlier."""

    def degraded(self) -> None:
        """Record a request that was admitted without the counters."""

    def settled(self, reserved: int, used: int, seconds: float) -> None:
        """Record the tokens of one settled request, and how long its settlement took."""

    def refused(self, error: LimitExceeded, seconds: float) -> None:
        """Record the decision that refused a request."""
        decision = "exhausted" if isinstance(error, QuotaExhausted) else "rate_limited"
        self.decided(decision, seconds, error.limit, error.level)


class MeasuredAdmission:
    """One admission, as a context: until work may start, and until the reservation is in the ledger. Set `degraded` in it."""

    def __init__(self, recorder: AdmissionRecorder, on_provisional: OnProvisional | None) -> None:
        self.degraded = False
        self._recorder = recorder
        self._on_provisional = on_provisional
        self._began = time.perf_counter()
        self._waited: float | None = None

    def on_provisional(self) -> None:
        """Note that work may start."""
        if self._waited is None:
            self._waited = time.perf_counter() - self._began
        if self._on_provisional is not None:
            self._on_provisional()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds, recorder = time.perf_counter() - self._began, self._recorder
        if error is None:
            recorder.decided("admitted", seconds if self._waited is None else self._waited)
            recorder.ledger_written(seconds)
            if self.degraded:
                recorder.degraded()
        elif isinstance(error, LimitExceeded):
            recorder.refused(error, seconds)
        else:
            for kind_of_error, decision in DECISIONS.items():
                if isinstance(error, kind_of_error):
                    recorder.decided(decision, seconds)
