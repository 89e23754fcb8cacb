"""Query parameters of usage and requests: times, buckets, groups and filters, checked.

Invariant: a refusal names the parameter and what is allowed.
"""

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar, get_args
from uuid import UUID

from loraplex.platform.errors import InvalidParameter
from loraplex.tenants.ledger.request_log import SHOWN_OUTCOMES, RequestFilters
from loraplex.tenants.ledger.usage_reports import Bucket, Dimension, UsageQuery
from loraplex.tenants.models.billing import CURRENCY

HOUR: Final = timedelta(hours=1)
MAX_RANGE: Final = timedelta(days=400)
FIRST_YEAR, LAST_YEAR = 2000, 2100
FORMATS: Final = ("json", "csv")
DEFAULT_BUCKET: Final = "1d"
MAX_MILLISECONDS: Final = 2**31 - 1
USAGE_PARAMETERS: Final = {
    "from": "Begin of the range, rounded down to a whole hour (UTC): a time such as `2026-11-01T00:00:00Z`, or a date. "
    "Default: the begin of the month of `to`.",
    "to": f"End of the range, exclusive, rounded up to a whole hour (UTC); at most {MAX_RANGE.days} days after `from`. "
    "Default: now.",
    "bucket": "Length of a row's time: `1h`, `1d` (default) or `1mo`, in UTC.",
    "group_by": "Any of `adapter`, `key` and `class`, separated by commas.",
    "currency": "Only this currency. Required if the range has usage in several.",
    "format": "`json` (default), or `csv`: all rows of the range, without pages. Behind the fields of the API it has "
    "names, and the `amount` in units of the currency.",
}
REQUEST_FILTERS: Final = {
    "adapter": "Only requests of the adapter of this name; the base model has its served name.",
    "key_id": "Only requests of the key with this public id.",
    "outcome": f"Only requests that ended so: {', '.join(f'`{each}`' for each in SHOWN_OUTCOMES)}.",
    "from": "Only requests admitted at this time (RFC 3339, or a date in UTC) or later.",
    "to": "Only requests admitted before this time.",
    "slower_than_ms": "Only requests that took longer, in milliseconds.",
    "session": "Only requests of this session: its label, such as `ses_0123456789abcdef0123456789abcdef`, or the text by which "
    "the client named it.",
}
_ChoiceT = TypeVar("_ChoiceT", bound=str)


def with_range(filters: Mapping[str, str], now: datetime) -> dict[str, str]:
    """Add the defaults of `from` and `to`, so that all pages of a listing are of one range."""
    end = _time("to", filters["to"]) if "to" in filters else now
    month = (end - timedelta(microseconds=1)).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return {"from": month.isoformat(), "to": end.isoformat(), **filters}


def usage_query(
    filters: Mapping[str, str], tenant_id: UUID | None, dimensions: tuple[Dimension, ...]
) -> UsageQuery:
    """Read the parameters of a report, with `from` and `to`. `dimensions` may be grouped by. Raises `InvalidParameter`."""
    start, to = _whole_hour(_time("from", filters["from"])), _time("to", filters["to"])
    end = _whole_hour(to) + (HOUR if to > _whole_hour(to) else timedelta())
    if not start < end:
        raise InvalidParameter("`from` must be earlier than `to`.", param="from")
    if end - start > MAX_RANGE:
        raise InvalidParameter(
            f"The range from `from` to `to` must be at most {MAX_RANGE.days} days.", param="from"
        )
    groups = [name for name in filters.get("group_by", "").split(",") if name]
    if len(groups) != len(set(groups)):
        raise InvalidParameter("`group_by` names something twice.", param="group_by")
    currency = filters.get("currency")
    if currency is not None and not re.fullmatch(CURRENCY, currency):
        raise InvalidParameter("`currency` must be three capital letters, as in ISO 4217.", param="currency")
    return UsageQuery(
        tenant_id=tenant_id,
        currency=currency,
        start=start,
        end=end,
        bucket=_choice("bucket", filters.get("bucket", DEFAULT_BUCKET), get_args(Bucket)),
        group_by=frozenset(_choice("group_by", name, dimensions) for name in groups),
    )


def request_filters(
    filters: Mapping[str, str], base_model: str, session_of: Callable[[str], str]
) -> RequestFilters:
    """Read the filters of a listing of requests; `base_model` is its served name, and `session_of` the label of a session.

    Raises `InvalidParameter`.
    """
    adapter, outcome = filters.get("adapter"), filters.get("outcome")
    return RequestFilters(
        adapter=None if adapter == base_model else adapter,
        base_model=base_model if adapter == base_model else None,
        key_id=filters.get("key_id"),
        outcome=None if outcome is None else _choice("outcome", outcome, SHOWN_OUTCOMES),
        start=_time("from", filters["from"]) if "from" in filters else None,
        end=_time("to", filters["to"]) if "to" in filters else None,
        session=session_of(filters["session"]) if "session" in filters else None,
        slower_than_ms=_milliseconds("slower_than_ms", filters.get("slower_than_ms")),
    )


def is_csv(filters: Mapping[str, str]) -> bool:
    """Whether a report is asked for as CSV. Raises `InvalidParameter`."""
    return _choice("format", filters.get("format", "json"), FORMATS) == "csv"


def _time(name: str, text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is not None and len(text) == len("2026-11-01"):
        time = time.replace(tzinfo=UTC)
    if time is None or time.tzinfo is None or not FIRST_YEAR <= time.year < LAST_YEAR:
        allowed = f"a time such as `2026-11-01T00:00:00Z` or a date, from {FIRST_YEAR} to {LAST_YEAR - 1}"
        raise InvalidParameter(f"`{name}` must be {allowed}.", param=name)
    return time.astimezone(UTC)


def _whole_hour(time: datetime) -> datetime:
    return time.replace(minute=0, second=0, microsecond=0)


def _choice(name: str, text: str, allowed: tuple[_ChoiceT, ...]) -> _ChoiceT:
    for each in allowed:
        if each == text:
            return each
    raise InvalidParameter(f"`{name}` must be one of {', '.join(allowed)}.", param=name)


def _milliseconds(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 10) or int(text) > MAX_MILLISECONDS:
        raise InvalidParameter(f"`{name}` must be a whole number from 0 to {MAX_MILLISECONDS}.", param=name)
    return int(text)
