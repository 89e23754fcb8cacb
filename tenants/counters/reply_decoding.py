"""Decodes what the scripts return into typed replies.

Invariant: budgets are counted in nano-units and reported in micro-units, rounded up, so that no reply promises too much.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from loraplex.tenants.counters.counter_replies import (
    RETRY_S,
    Admitted,
    AlreadyEnded,
    CounterReply,
    CountersMissing,
    Decision,
    Denied,
    Explanation,
    LimitUse,
    PeriodUse,
    PolicyOutdated,
    SettledUse,
)
from loraplex.tenants.periods import period_end
from loraplex.tenants.quotas.limits import (
    BUDGETS,
    COUNTED,
    NANO_PER_MICRO,
    PER_SESSION,
    Level,
    LimitName,
    Subject,
)

# As the scripts number them, also in denials of the release that knew no groups.
LEVELS: tuple[Level, ...] = ("tenant", "key", "adapter", "group")
DECISION_WIDTH = 8
USE_WIDTH = 14
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def decode_admission(reply: Sequence[Any]) -> CounterReply:
    """Decode the reply of `admit.lua`."""
    kind = text(reply[0])
    if kind == "unseeded":
        return CountersMissing()
    if kind == "stale":
        return PolicyOutdated(reply[1])
    if kind == "ended":
        return AlreadyEnded()
    epoch, microseconds, day, month, overdue, repeated, numbers = reply[1:]
    at, day, month = moment(microseconds), text(day), text(month)
    decisions = decode_decisions(numbers, at, day, month)
    if kind == "denied":
        return Denied(at=at, decisions=decisions, overdue=overdue)
    return Admitted(
        epoch=epoch,
        at=at,
        day=day,
        month=month,
        decisions=decisions,
        overdue=overdue,
        repeated=bool(repeated),
    )


def decode_decisions(numbers: Sequence[int], at: datetime, day: str, month: str) -> tuple[Decision, ...]:
    rows = zip(*[iter(numbers)] * DECISION_WIDTH, strict=True)
    return tuple(_decision(row, at, day, month) for row in rows)


def decode_explanation(line: bytes | str | None) -> Explanation | None:
    """Decode the reply of `explain.lua`."""
    if line is None:
        return None
    request_id, microseconds, day, month, *numbers = text(line).split(" ")
    at = moment(int(microseconds))
    return Explanation(
        request_id=request_id, at=at, decisions=decode_decisions([*map(int, numbers)], at, day, month)
    )


def decode_use(
    reply: Sequence[Any], subjects: Sequence[Subject], *, in_session: bool = False
) -> tuple[int, list[LimitUse]] | None:
    """Decode the reply of `read.lua` for these subjects: the epoch and the use. `in_session`: it has that of one session."""
    if not reply:
        return None
    at, day, month = moment(reply[1]), text(reply[2]), text(reply[3])
    rows = zip(*[iter(map(int, reply[4:]))] * USE_WIDTH, strict=True)
    return reply[0], [
        use
        for subject, row in zip(subjects, rows, strict=True)
        for use in _uses(subject, row, at, period_end(day), period_end(month))
        if in_session or use.name != PER_SESSION
    ]


def decode_settled(reply: Sequence[Any]) -> SettledUse | None:
    """Decode the reply of `settled.lua`."""
    if not reply:
        return None
    epoch, at, day, month, *numbers = reply[:8]
    day_tokens, day_amount, month_tokens, month_amount = map(int, numbers)
    uses = PeriodUse(text(day), day_tokens, day_amount), PeriodUse(text(month), month_tokens, month_amount)
    return SettledUse(epoch, moment(at), uses, tuple(map(member, reply[8:])))


def moment(microseconds: int) -> datetime:
    return EPOCH + microseconds * MICROSECOND


def text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def member(value: bytes | str) -> UUID:
    return UUID(text(value))


def _decision(row: Sequence[int], at: datetime, day: str, month: str) -> Decision:
    level, index, limit, used, reserved, requested, passed, wait = row
    name = COUNTED[index - 1]
    decision = Decision(
        level=LEVELS[level - 1],
        name=name,
        limit=_to_micro(name, limit),
        used=_to_micro(name, used),
        reserved=_to_micro(name, reserved),
        asked=_to_micro(name, requested),
        passed=bool(passed),
        retry_after_s=0.0,
    )
    return (
        decision if passed else replace(decision, retry_after_s=_retry_after(decision, wait, at, day, month))
    )


def _retry_after(failed: Decision, wait: int, at: datetime, day: str, month: str) -> float | None:
    """A rate's wait is known; running requests may end at any time; what is used up waits for the end of its period, and that
    of a session has none.
    """
    if wait < 0 or (failed.name == PER_SESSION and failed.used + failed.asked > failed.limit):
        return None
    if failed.name.endswith("_per_minute"):
        return wait / 1e6
    if failed.name in ("concurrent_requests", PER_SESSION):
        return RETRY_S
    end_s = (period_end(day if failed.name.endswith("_per_day") else month) - at).total_seconds()
    return end_s if failed.exhausted else min(RETRY_S, end_s)


def _uses(
    subject: Subject, row: Sequence[int], at: datetime, day_end: datetime, month_end: datetime
) -> list[LimitUse]:
    requests, tokens, reserved, running = row[:4]
    day, month = row[4:8], row[8:12]
    counted: tuple[tuple[int, int, datetime | None], ...] = (
        (requests, 0, _refilled(at, requests, subject.limits.requests_per_minute)),
        (tokens, reserved, _refilled(at, tokens + reserved, subject.limits.tokens_per_minute)),
        (running, 0, None),
        (day[0], day[1], day_end),
        (month[0], month[1], month_end),
        (day[2], day[3], day_end),
        (month[2], month[3], month_end),
        (row[12], row[13], None),
    )
    return [
        LimitUse(
            level=subject.level,
            subject_id=subject.id,
            name=name,
            limit=subject.limits.get(name),
            used=_to_micro(name, used),
            reserved=_to_micro(name, reserved),
            resets_at=resets_at,
        )
        for name, (used, reserved, resets_at) in zip(COUNTED, counted, strict=True)
    ]


def _refilled(at: datetime, lacks: int, limit: int | None) -> datetime | None:
    return at + timedelta(seconds=min(60.0, lacks * 60 / limit)) if limit else None


def _to_micro(name: LimitName, counted: int) -> int:
    return -(-counted // NANO_PER_MICRO) if name in BUDGETS else counted
