"""Rows of the ledger name exactly the columns that its statements read: a missing one would be a null."""

import re
from datetime import UTC, datetime
from uuid import uuid4

from sqlalchemy import inspect
from tests.tenants.counters.limited_tenant import LimitedTenant

from loraplex.tenants.billing.pricing import NO_PRICE
from loraplex.tenants.ledger.corrections import correction_row
from loraplex.tenants.ledger.statements import RESERVE, RESERVE_WITHOUT_COUNTERS, SETTLE
from loraplex.tenants.ledger.usage_ledger import reservation_row, usage_row
from loraplex.tenants.models import UsageRecord
from loraplex.tenants.quotas.reservation import Reservation, SettledUsage

RESERVATION = Reservation(
    request=LimitedTenant().request(), day="d", month="m", admitted_at=datetime.now(UTC), price=NO_PRICE
)
COLUMNS = re.compile(r"json_to_recordset\(%s::json\) AS \w+ \((.*?)\)", re.DOTALL)


def read_columns(statement: str) -> list[str]:
    found = COLUMNS.search(statement)
    assert found is not None
    return [column.split()[0] for column in found[1].split(",")]


def test_a_reservation_names_the_columns_of_its_statements() -> None:
    row = reservation_row(RESERVATION, uuid4(), 45.0)
    assert [*row] == read_columns(RESERVE) == read_columns(RESERVE_WITHOUT_COUNTERS)


def test_usage_names_the_columns_of_its_statement() -> None:
    assert [*usage_row(RESERVATION, SettledUsage(outcome="failed"))] == read_columns(SETTLE)


def test_a_correction_names_columns_of_its_statement() -> None:
    used = SettledUsage(
        outcome="completed", prompt_tokens=7, cached_tokens=3, completion_tokens=5, reasoning_tokens=2
    )
    settled = usage_row(RESERVATION, used)
    names = {column.name for column in inspect(UsageRecord).columns}
    record = UsageRecord(**{name: value for name, value in settled.items() if name in names})
    correction = correction_row(record, "wrong")
    assert {*correction} <= {*read_columns(SETTLE)}
    assert (correction["uncached_tokens"], correction["cached_tokens"]) == (-4, -3)
    assert (correction["completion_tokens"], correction["reasoning_tokens"]) == (-5, -2)
    differing = {name for name in correction if correction[name] != settled[name]}
    tokens = {"uncached_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens"}
    assert differing == {"id", "kind", "reverses_id", "reason", *tokens}
    assert (correction["reverses_id"], correction["reason"]) == (settled["id"], "wrong")
