"""Response schemas of limits, their use, refusals and threshold events. Budgets in micro-units of money, times in UTC."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Literal
from uuid import UUID

from pydantic import Field

from loraplex.platform.web.cursors import Listing
from loraplex.platform.web.request_bodies import RequestModel
from loraplex.platform.web.responses import ResponseModel
from loraplex.tenants.counters.counter_replies import RETRY_S, Decision, Explanation, LimitUse, UnknownLimit
from loraplex.tenants.quotas.delegated_quotas import QuotaState, ResourceUse
from loraplex.tenants.quotas.limits import (
    COUNTED,
    MAX_BUDGET,
    MAX_INTEGER,
    MAX_RATE,
    Level,
    LimitName,
    QuotaLimits,
)
from loraplex.tenants.quotas.threshold_events import Event
from loraplex.tenants.records import UtcTime

Rate = Annotated[int | None, Field(ge=0, le=MAX_RATE)]
Count = Annotated[int | None, Field(ge=0, le=MAX_INTEGER)]
Budget = Annotated[int | None, Field(ge=0, le=MAX_BUDGET)]


class QuotaLimitFields(RequestModel):
    """The limits that requests are counted against; null is no limit."""

    requests_per_minute: Rate = None
    tokens_per_minute: Rate = None
    concurrent_requests: Rate = None
    tokens_per_day: Count = None
    tokens_per_month: Count = None
    budget_per_day: Budget = None
    budget_per_month: Budget = None


class LimitDocument(ResponseModel):
    """`limit` is null where this level has no limit; another level may have one. `used` is null where nothing is counted,
    because no limit requires it.
    """

    limit: int | None
    used: int | None
    reserved: int | None
    resets_at: UtcTime | None


class QuotaDocument(ResponseModel):
    """`name`: that of the tenant, the public id of the key, or the name of the adapter. `revision` is the ETag of these limits.
    `group`: a key whose limits all keys below it share, their use included; `name` is that key's.
    """

    level: Level
    name: str
    revision: int
    limits: dict[str, LimitDocument]


class QuotasDocument(Listing[QuotaDocument]):
    """The tenant first, then the valid keys, groups of them, and the adapters with limits of their own, sorted by name."""

    currency: str


class LimitsDocument(ResponseModel):
    """The limits of a key or an adapter; where one is null, only that of the tenant applies."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None
    tokens_per_day: int | None
    tokens_per_month: int | None
    budget_per_day: int | None
    budget_per_month: int | None


class DecisionDocument(ResponseModel):
    """One limit at the time of the request. `used` and `reserved`: before the request, null where unknown. `asked`: the most
    that the request would use. In degraded mode, `limit` and `used` are those of the gateway's share.
    """

    level: Level
    name: LimitName
    limit: int
    used: int | None
    reserved: int | None
    asked: int
    passed: bool
    retry_after_s: float | None


class ExplanationDocument(ResponseModel):
    """Why a request was refused: every limit that was checked, also those that it would have passed. `mode`: `counted` by the
    counters of all gateways, or `degraded` by the share of one gateway while the counters were unavailable.
    """

    request_id: str
    at: UtcTime
    mode: Literal["counted", "degraded"]
    decisions: list[DecisionDocument]


class EventDocument(ResponseModel):
    """The use of a budget crossed `threshold` percent of its limit. `name` is null when the key or adapter is gone."""

    id: UUID
    at: UtcTime
    level: str
    name: str | None
    limit_name: str
    period: str
    threshold: int
    used: int
    limit: int


def quota_response(
    state: QuotaState, uses: Sequence[LimitUse], resources: Mapping[str, ResourceUse] | None
) -> QuotaDocument:
    """Build the response of one subject. `uses` are its own; `resources` are the tenant's, and None for other levels."""
    known = {use.name: use for use in uses}
    limits: dict[str, LimitDocument] = {
        name: _limit(state.limits.get(name), known.get(name)) for name in COUNTED
    }
    if state.level == "tenant" and resources is not None:
        limits |= {
            name: LimitDocument(limit=each.limit, used=each.used, reserved=0, resets_at=None)
            for name, each in resources.items()
        }
    return QuotaDocument(level=state.level, name=state.name, revision=state.revision, limits=limits)


def limits_response(limits: QuotaLimits) -> LimitsDocument:
    return LimitsDocument(**{name: limits.get(name) for name in COUNTED})


def explanation_response(explanation: Explanation) -> ExplanationDocument:
    return ExplanationDocument(
        request_id=explanation.request_id,
        at=explanation.at,
        mode="degraded" if explanation.degraded else "counted",
        decisions=[*map(_decision, explanation.decisions), *map(_unknown, explanation.unknown)],
    )


def event_response(event: Event) -> EventDocument:
    row, key_id, adapter = event
    return EventDocument(
        id=row.id,
        at=row.created_at,
        level=row.level,
        name=key_id or adapter,
        limit_name=row.limit_name,
        period=row.period,
        threshold=row.threshold,
        used=row.used,
        limit=row.limit_value,
    )


def _limit(limit: int | None, use: LimitUse | None) -> LimitDocument:
    if use is None:
        return LimitDocument(limit=limit, used=None, reserved=None, resets_at=None)
    return LimitDocument(limit=limit, used=use.used, reserved=use.reserved, resets_at=use.resets_at)


def _decision(decision: Decision) -> DecisionDocument:
    return DecisionDocument(**asdict(decision))


def _unknown(limit: UnknownLimit) -> DecisionDocument:
    return DecisionDocument(**asdict(limit), used=None, reserved=None, passed=False, retry_after_s=RETRY_S)
