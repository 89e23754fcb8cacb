"""Denials in memory: of each tenant its newest, within bounds, for a day."""

from datetime import UTC, datetime
from uuid import UUID

from loraplex.tenants.admission.denial_log import KEPT_SECONDS, MAX_DENIALS, MAX_PER_TENANT, DenialLog
from loraplex.tenants.counters.counter_replies import Explanation

ACME, RIVAL = UUID(int=1), UUID(int=2)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def denial(request_id: str) -> Explanation:
    return Explanation(request_id=request_id, at=datetime.now(UTC), decisions=(), degraded=True)


def test_they_are_the_tenants_own_and_the_newest_counts() -> None:
    denials = DenialLog(Clock())
    older, newer = denial("r"), denial("r")
    for each in (older, newer):
        denials.remember(ACME, each)
    assert denials.find(ACME, "r") is newer and len(denials) == 1
    assert denials.find(RIVAL, "r") is None and denials.find(ACME, "other") is None


def test_many_denials_of_a_tenant_displace_its_own() -> None:
    denials = DenialLog(Clock())
    denials.remember(RIVAL, denial("kept"))
    for number in range(MAX_PER_TENANT + 5):
        denials.remember(ACME, denial(f"r-{number}"))
    assert len(denials) == MAX_PER_TENANT + 1 and denials.find(RIVAL, "kept") is not None
    assert denials.find(ACME, "r-4") is None and denials.find(ACME, "r-5") is not None


def test_all_together_are_bounded() -> None:
    denials = DenialLog(Clock())
    for number in range(MAX_DENIALS + 3):
        denials.remember(UUID(int=number), denial("r"))
    assert len(denials) == MAX_DENIALS
    assert denials.find(UUID(int=2), "r") is None and denials.find(UUID(int=3), "r") is not None


def test_after_a_day_they_are_forgotten() -> None:
    clock = Clock()
    denials = DenialLog(clock)
    denials.remember(ACME, denial("old"))
    clock.now = KEPT_SECONDS - 1
    denials.remember(ACME, denial("new"))
    assert denials.find(ACME, "old") is not None
    clock.now = KEPT_SECONDS
    assert denials.find(ACME, "old") is None and denials.find(ACME, "new") is not None
    assert len(denials) == 1
