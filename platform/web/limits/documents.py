"""Schemas of limits with their use, and of refusals. Budgets in micro-units of money, times in UTC."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from loraplex.platform.web.cursors import Listing
from loraplex.platform.web.request_bodies import RequestModel
from loraplex.platform.web.responses import ResponseModel
from loraplex.tenants.quotas.limits import BUDGETS, COUNTED, MAXIMA, Level, LimitName
from loraplex.tenants.records import UtcTime


def limit_annotations(names: Iterable[str], money: Any = int) -> dict[str, Any]:
    """Return the annotations of a model's fields that are limits: none by default, and at most their maxima. `money`: the type
    of budgets.
    """
    return {
        name: Annotated[
            (money if name in BUDGETS else int) | None, Field(default=None, ge=0, le=MAXIMA[name])
        ]
        for name in names
    }


class QuotaLimitFields(RequestModel):
    """The limits that requests are counted against; null is no limit."""

    # One field for each limit: names and maxima stand in `tenants/quotas/limits.py` alone.
    __annotations__ = limit_annotations(COUNTED)


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
