"""Usage and requests over HTTP on a real database: shapes, pages, CSV, bounds, and no row of another tenant."""

import csv
import io
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from tests.platform.web.gateway import SECRET
from tests.tenants.ledger.stored_usage import Used, UsingTenant, make_tenant, settle

from loraplex.platform.inference.sessions import session_label
from loraplex.platform.server.secret import derive
from loraplex.platform.web.usage import queries as usage
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.ids import uuid7_derived
from loraplex.tenants.ledger import request_log, usage_reports
from loraplex.tenants.ledger.failed_requests import Refused
from loraplex.tenants.ledger.usage_ledger import UsageLedger

FIRST = datetime(2026, 10, 31, 22, 30, tzinfo=UTC)
HOUR = timedelta(hours=1)
RANGE = {"from": "2026-10-31", "to": "2026-11-02"}
SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "amount_pico")
ROW = {"start", "adapter", "key_id", *SUMS}
REQUEST = {
    *("id", "at", "adapter", "version", "digest", "key_id", "outcome", "prompt_tokens", "cached_tokens"),
    *("completion_tokens", "ttft_ms", "duration_ms", "amount_pico", "price_version_id", "client_request_id"),
    *("system_fingerprint", "reasoning_tokens", "session"),
}


@dataclass
class Reader:
    """A tenant, and a client with a key of it that reads usage."""

    tenant: UsingTenant
    http: httpx.AsyncClient
    url: str

    def used(self, hours: int = 0, adapter: str | None = "support", **fields: Any) -> Used:
        """A request of the first key, `hours` after `FIRST`, at the first price in USD."""
        adapter_id = None if adapter is None else self.tenant.adapters[adapter]
        key = next(iter(self.tenant.keys.values()))
        version = self.tenant.version("USD")
        return replace(Used(adapter_id, key, FIRST + hours * HOUR, price_version_id=version), **fields)

    def settle(self, *requests: Used) -> list[UUID]:
        return settle(self.url, self.tenant, requests)

    async def ok(self, path: str, query: Mapping[str, Any] = RANGE) -> Any:
        response = await self.http.get(path, params=query)
        assert response.status_code == 200, response.text
        return response.json()

    async def refused(self, path: str, query: Mapping[str, Any]) -> tuple[int, str, str]:
        """Status, parameter and text of the refusal."""
        response = await self.http.get(path, params=query)
        error = response.json()["error"]
        return response.status_code, error["param"], error["message"]


async def reader_of(gateway: Any, database: Database, stack: Any) -> Reader:
    tenant = make_tenant(database.url)
    async with database.as_operator() as session:
        key = (await KeyRepository(session).create(tenant.id, "reader", ["usage:read"])).plaintext
    headers = {"authorization": f"Bearer {key}"}
    http = httpx.AsyncClient(base_url=f"{gateway.url}/tenant/v1", headers=headers)
    stack.push_async_callback(http.aclose)
    return Reader(tenant, http, database.url)


@pytest.fixture
async def readers(start_gateway: Any, database: Database) -> AsyncIterator[tuple[Reader, Reader]]:
    gateway = await start_gateway()
    yield (
        await reader_of(gateway, database, gateway.stack),
        await reader_of(gateway, database, gateway.stack),
    )


@pytest.fixture
def reader(readers: tuple[Reader, Reader]) -> Reader:
    return readers[0]


async def test_usage_has_the_shape_of_the_contract(reader: Reader) -> None:
    reader.settle(reader.used(), reader.used(1), reader.used(2, adapter=None, client_request_id="mine"))
    report = await reader.ok("usage")
    assert report.keys() == {"data", "totals", "currency", "next_cursor"}
    assert [row["start"] for row in report["data"]] == ["2026-10-31T00:00:00Z", "2026-11-01T00:00:00Z"]
    amount = 10 * 3_000_001 + 4 * 1 + 6 * 7_000_003
    expected = {
        "start": "2026-10-31T00:00:00Z",
        "adapter": None,
        "key_id": None,
        "requests": 2,
        "prompt_tokens": 28,
        "cached_tokens": 8,
        "completion_tokens": 12,
        "reasoning_tokens": 0,
        "amount_pico": str(2 * amount),
    }
    assert report["data"][0] == expected
    assert report["totals"] == {
        "requests": 3,
        "prompt_tokens": 42,
        "cached_tokens": 12,
        "completion_tokens": 18,
        "reasoning_tokens": 0,
        "amount_pico": str(3 * amount),
        "refused": 0,
    }
    assert (report["currency"], report["next_cursor"]) == ("USD", None)


async def test_what_was_refused_is_said_apart_and_is_no_request(
    readers: tuple[Reader, Reader], database: Database
) -> None:
    reader, other = readers
    reader.settle(reader.used(), reader.used(1))
    tenant, ledger = reader.tenant, UsageLedger(database)
    counts = [
        (tenant, 0, "support", "rate_limit_exceeded", 2825),
        (tenant, 1, None, "overloaded", 3),
        (tenant, 72, None, "overloaded", 5),
        (other.tenant, 0, None, "overloaded", 7),
    ]
    for of, hours, adapter, code, number in counts:
        refused = Refused(
            hour=(FIRST + hours * HOUR).replace(minute=0),
            tenant_id=of.id,
            api_key_id=next(iter(of.keys.values())),
            adapter_id=None if adapter is None else of.adapters[adapter],
            status=f"refused_{code}",
        )
        await ledger.count_refusals({refused: number})
    await ledger.close()
    query: dict[str, Any] = {**RANGE, "bucket": "1h", "limit": 1}
    first = await reader.ok("usage", query)
    assert [(row["requests"], "refused" in row) for row in first["data"]] == [(1, False)]
    assert (first["totals"]["requests"], first["totals"]["refused"]) == (2, 2828)
    second = await reader.ok("usage", {"cursor": first["next_cursor"]})
    assert second["totals"] == first["totals"]
    elsewhere = await reader.ok("usage", {**query, "currency": "EUR"})
    assert (elsewhere["totals"]["requests"], elsewhere["totals"]["refused"]) == (0, 2828)


async def test_usage_by_adapter_and_class(reader: Reader) -> None:
    reader.settle(reader.used(), reader.used(adapter=None))
    report = await reader.ok("usage", {**RANGE, "bucket": "1mo", "group_by": "adapter,class"})
    rows = [
        (row["adapter"], row["token_class"], row["prompt_tokens"], row["amount_pico"])
        for row in report["data"]
    ]
    by_class = [
        ("uncached_prompt", 10, "30000010"),
        ("cached_prompt", 4, "4"),
        ("completion", 0, "42000018"),
    ]
    assert rows == [(adapter, *each) for adapter in (None, "support") for each in by_class]
    assert all(row["start"] == "2026-10-01T00:00:00Z" for row in report["data"])


async def test_reasoning_is_a_class_of_its_own_and_among_the_completion(reader: Reader) -> None:
    reader.settle(
        reader.used(reasoning=2),
        reader.used(1, reasoning=5, price_version_id=reader.tenant.version("USD", 1)),
    )
    query = {**RANGE, "bucket": "1mo", "group_by": "class"}
    rows = {row["token_class"]: row for row in (await reader.ok("usage", query))["data"]}
    assert [*rows] == ["uncached_prompt", "cached_prompt", "completion", "reasoning"]
    shown = [(row["completion_tokens"], row["reasoning_tokens"], row["amount_pico"]) for row in rows.values()]
    assert shown[2:] == [(5, 0, str(4 * 7_000_003 + 11)), (7, 7, str(2 * 7_000_003 + 5 * 23))]
    report = await reader.ok("usage", {**RANGE, "bucket": "1h", "limit": 1})
    assert (report["totals"]["completion_tokens"], report["totals"]["reasoning_tokens"]) == (12, 7)
    (request, _) = (await reader.ok("requests"))["data"]
    assert (request["completion_tokens"], request["reasoning_tokens"]) == (6, 5)


async def test_a_range_is_whole_hours(reader: Reader) -> None:
    reader.settle(reader.used(), reader.used(1), reader.used(2))
    within = {"from": "2026-10-31T23:10:00Z", "to": "2026-10-31T23:20:00Z", "bucket": "1h"}
    report = await reader.ok("usage", within)
    assert [row["start"] for row in report["data"]] == ["2026-10-31T23:00:00Z"]
    assert report["totals"]["requests"] == 1


async def test_without_a_range_usage_is_that_of_this_month(reader: Reader) -> None:
    now = datetime.now(UTC)
    reader.settle(reader.used(at=now), reader.used(at=now.replace(day=1, hour=0) - timedelta(days=1)))
    report = await reader.ok("usage", {})
    assert report["totals"]["requests"] == 1
    empty = await reader.ok("usage", {"from": "2021-01-01", "to": "2021-01-02"})
    assert (empty["data"], empty["totals"]["amount_pico"], empty["currency"]) == ([], "0", "USD")


@pytest.mark.parametrize("group_by", ["", "adapter", "class", "adapter,key,class"])
async def test_totals_are_the_same_from_few_rows_and_from_the_range(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, group_by: str
) -> None:
    nothing: dict[str, Any] = {"uncached": 0, "cached": 0, "completion": 0}
    reader.settle(
        *(reader.used(hours) for hours in range(3)),
        reader.used(5, adapter=None, **nothing),
        reader.used(6, adapter=None, price_version_id=None, amount_pico=5, **nothing),
        reader.used(6, "coral", price_version_id=reader.tenant.version("USD", 1)),
    )
    query = {**RANGE, "bucket": "1h", "group_by": group_by} if group_by else {**RANGE, "bucket": "1h"}
    whole = await reader.ok("usage", query)
    monkeypatch.setattr(usage_reports, "WHOLE_ROWS", 0)
    assert (await reader.ok("usage", {**query, "limit": 1}))["totals"] == whole["totals"]
    assert whole["totals"]["requests"] == 6


@pytest.mark.parametrize("whole_rows", [0, 500])
async def test_pages_have_the_range_of_the_first_one_and_its_totals(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, whole_rows: int
) -> None:
    monkeypatch.setattr(usage_reports, "WHOLE_ROWS", whole_rows)
    reader.settle(*(reader.used(hours) for hours in range(5)))
    query: dict[str, Any] = {"from": "2026-10-31", "to": "2026-12-31", "bucket": "1h", "limit": 2}
    seen, totals = [], []
    while True:
        report = await reader.ok("usage", query)
        seen += [row["start"] for row in report["data"]]
        totals.append(report["totals"]["requests"])
        if report["next_cursor"] is None:
            break
        # Settled meanwhile: before the position, which the cursor has passed, and behind it.
        reader.settle(reader.used(-1), reader.used(len(totals) + 4))
        query = {"cursor": report["next_cursor"], "from": "2026-10-31", "limit": 2}
    assert seen == sorted(set(seen)) and len(seen) >= 5
    assert totals == [5] * len(totals)
    bad = {"cursor": report["next_cursor"] or "x", "bucket": "1d"}
    assert (await reader.refused("usage", bad))[:2] == (400, "cursor")


async def test_amounts_of_two_currencies_are_never_added(reader: Reader) -> None:
    euro = reader.tenant.version("EUR")
    reader.settle(reader.used(), reader.used(price_version_id=euro))
    status, param, message = await reader.refused("usage", RANGE)
    assert (status, param) == (400, "currency") and "EUR, USD" in message
    for currency in ("EUR", "USD"):
        report = await reader.ok("usage", {**RANGE, "currency": currency})
        assert (report["currency"], report["totals"]["requests"]) == (currency, 1)


@pytest.mark.parametrize(
    ("query", "param", "text"),
    [
        ({"from": "2026-11-02", "to": "2026-11-02"}, "from", "earlier"),
        ({"from": "2025-01-01", "to": "2026-11-02"}, "from", "400 days"),
        ({"from": "2026-11-02T10:00:00"}, "from", "2026-11-01T00:00:00Z"),
        ({"to": "9999-12-31"}, "to", "2099"),
        ({"from": "yesterday"}, "from", "a date"),
        ({"bucket": "1w"}, "bucket", "1h, 1d, 1mo"),
        ({"group_by": "adapter,tenant"}, "group_by", "adapter, key, class"),
        ({"group_by": "key,key"}, "group_by", "twice"),
        ({"format": "xml"}, "format", "json, csv"),
        ({"format": "csv", "limit": "5"}, "limit", "all rows"),
        ({"limit": "101"}, "limit", "100"),
    ],
)
async def test_usage_names_the_wrong_parameter(
    reader: Reader, query: dict[str, str], param: str, text: str
) -> None:
    status, at_fault, message = await reader.refused("usage", query)
    assert (status, at_fault) == (400, param)
    assert text in message


async def test_csv_has_all_rows_of_the_range(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "ROWS_AT_ONCE", 2)
    reader.settle(*(reader.used(hours, adapter) for hours in range(3) for adapter in ("coral", "support")))
    query = {**RANGE, "bucket": "1h", "group_by": "adapter,key"}
    response = await reader.http.get("usage", params={**query, "format": "csv"})
    assert response.headers["content-type"].startswith("text/csv")
    rows = [*csv.DictReader(io.StringIO(response.text))]
    listed = (await reader.ok("usage", query))["data"]
    assert [*rows[0]] == ["start", "adapter", "key_id", *SUMS, "currency", "key_name", "amount"]
    assert [{name: row[name] for name in ROW} for row in rows] == [
        {name: str(value) for name, value in row.items()} for row in listed
    ]
    assert len(rows) == 6 and {row["currency"] for row in rows} == {"USD"}


async def test_requests_have_the_shape_of_the_contract(reader: Reader) -> None:
    (settled,) = reader.settle(reader.used(client_request_id="mine-1", duration_ms=120))
    listing = await reader.ok("requests")
    assert listing.keys() == {"data", "next_cursor"}
    (row,) = listing["data"]
    assert row.keys() == REQUEST
    assert row["id"] == str(settled) and row["client_request_id"] == "mine-1"
    assert (row["at"], row["adapter"], row["version"]) == ("2026-10-31T22:30:00Z", "support", 1)
    assert row["key_id"] == next(iter(reader.tenant.keys))
    assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == (14, 4, 6)
    assert row["amount_pico"] == str(10 * 3_000_001 + 4 + 6 * 7_000_003)
    assert (row["ttft_ms"], row["duration_ms"]) == (None, 120)
    detail = {**row, "limits": None}
    assert await reader.ok(f"requests/{settled}") == detail == await reader.ok("requests/mine-1")


async def test_of_several_requests_with_one_id_of_the_client_the_newest_is_found(reader: Reader) -> None:
    reader.settle(reader.used(client_request_id="again"))
    (newest,) = reader.settle(reader.used(1, client_request_id="again"))
    assert (await reader.ok("requests/again"))["id"] == str(newest)


async def test_a_correction_is_listed_and_names_what_it_reverses(reader: Reader) -> None:
    (settled,) = reader.settle(reader.used(client_request_id="mine"))
    taken_back: dict[str, Any] = {"uncached": -10, "cached": -4, "completion": -6}
    correction = reader.used(
        client_request_id="mine", reverses_id=settled, id=uuid7_derived(settled, "correction"), **taken_back
    )
    reader.settle(correction)
    rows = {row["id"]: row for row in (await reader.ok("requests"))["data"]}
    assert len(rows) == 2 and rows[str(settled)].keys() == REQUEST
    row = rows[str(correction.id)]
    assert (row["reverses_id"], row["reason"], row["prompt_tokens"]) == (str(settled), "a mistake", -14)
    assert await reader.ok("requests/mine") == {**rows[str(settled)], "limits": None}
    assert await reader.ok(f"requests/{correction.id}") == {**row, "limits": None}
    totals = (await reader.ok("usage"))["totals"]
    assert (totals["requests"], totals["prompt_tokens"], totals["amount_pico"]) == (1, 0, "0")


async def test_requests_are_filtered(reader: Reader) -> None:
    second = [*reader.tenant.keys][1]
    reader.settle(
        reader.used(0, adapter=None, duration_ms=50),
        reader.used(1, outcome="failed", duration_ms=100),
        reader.used(2, api_key_id=reader.tenant.keys[second], duration_ms=101),
    )

    async def hours(**query: Any) -> list[int]:
        found = (await reader.ok("requests", query))["data"]
        return [(datetime.fromisoformat(row["at"]) - FIRST) // HOUR for row in found]

    assert await hours() == [2, 1, 0]
    assert await hours(adapter="support") == [2, 1]
    assert await hours(adapter="demo/base") == [0]
    assert await hours(adapter="nonesuch") == []
    assert await hours(key_id=second) == [2]
    assert await hours(outcome="failed") == [1]
    assert await hours(slower_than_ms=100) == [2]
    assert await hours(session="nonesuch") == []
    assert await hours(**{"from": "2026-10-31T23:30:00Z", "to": "2026-11-01T00:30:00Z"}) == [1]


async def test_a_session_is_found_by_its_label_and_by_the_clients_own_text(
    readers: tuple[Reader, Reader],
) -> None:
    derive_key, (reader, other) = partial(derive, SECRET), readers
    text = f"user_{'a' * 64}_account__session_{uuid4()}"
    label = session_label(derive_key, reader.tenant.id, text)
    assert label != session_label(derive_key, other.tenant.id, text)
    settled = reader.settle(*(reader.used(hours, session=label) for hours in range(3)), reader.used(5))
    other.settle(other.used(session=label))
    for session in (label, text):
        first = await reader.ok("requests", {"session": session, "limit": 2})
        rest = await reader.ok("requests", {"cursor": first["next_cursor"]})
        rows = first["data"] + rest["data"]
        assert [row["id"] for row in rows] == [str(each) for each in reversed(settled[:3])]
        assert {row["session"] for row in rows} == {label}
    assert (await other.ok("requests", {"session": text}))["data"] == []


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"outcome": "lost"}, "outcome"),
        ({"slower_than_ms": "-1"}, "slower_than_ms"),
        ({"slower_than_ms": "²"}, "slower_than_ms"),
        ({"slower_than_ms": str(2**31)}, "slower_than_ms"),
        ({"from": "soon"}, "from"),
        ({"to": "2026-13-01"}, "to"),
    ],
)
async def test_requests_name_the_wrong_filter(reader: Reader, query: dict[str, str], param: str) -> None:
    assert (await reader.refused("requests", query))[:2] == (400, param)


async def test_pages_of_requests_neither_repeat_nor_skip_while_requests_end(reader: Reader) -> None:
    settled = reader.settle(*(reader.used(hours) for hours in range(5)))
    seen, query = [], {"limit": 2}
    while True:
        listing = await reader.ok("requests", query)
        seen += [row["id"] for row in listing["data"]]
        reader.settle(reader.used(10 + len(seen)))
        if listing["next_cursor"] is None:
            break
        query = {"limit": 2, "cursor": listing["next_cursor"]}
    assert seen == [str(each) for each in reversed(settled)]


async def test_a_page_reads_a_bounded_number_of_rows(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "SCANNED", 3)
    reader.settle(
        *(reader.used(hours, outcome="failed" if hours in (0, 6) else "completed") for hours in range(8))
    )
    sizes, query = [], {"outcome": "failed", "limit": 5}
    while True:
        listing = await reader.ok("requests", query)
        sizes.append(len(listing["data"]))
        if listing["next_cursor"] is None:
            break
        query = {"outcome": "failed", "limit": 5, "cursor": listing["next_cursor"]}
    assert sizes == [1, 0, 1], "newest first, three rows at a time"


async def test_a_timeline_has_the_phases_in_order(reader: Reader) -> None:
    phases = {"decode": [30, 90], "queue": [2, 5], "prefill": [8, 22]}
    settled, without = reader.settle(
        reader.used(phases=phases, client_request_id="mine"), reader.used(1, client_request_id="older")
    )
    spans = (await reader.ok(f"requests/{settled}/timeline"))["spans"]
    assert [(span["name"], span["start_ms"], span["duration_ms"]) for span in spans] == [
        ("queue", 2, 5),
        ("prefill", 8, 22),
        ("decode", 30, 90),
    ]
    assert spans[0].keys() == {"name", "start_ms", "duration_ms", "reason"}
    assert await reader.ok("requests/mine/timeline") == {"spans": spans}
    status, _, message = await reader.refused(f"requests/{without}/timeline", {})
    assert status == 404 and "not any more" in message
    status, _, message = await reader.refused(f"requests/{uuid4()}/timeline", {})
    assert status == 404 and "no finished request has this id" in message


async def test_a_request_has_the_limits_that_it_met(reader: Reader) -> None:
    limits = {"degraded": True, "met": [["key", "tokens_per_minute", 900, 5, 4, 3]]}
    (settled,) = reader.settle(reader.used(phases={"decode": [0, 1]}, limits=limits))
    met = {"level": "key", "name": "tokens_per_minute", "limit": 900, "used": 5, "reserved": 4, "asked": 3}
    assert (await reader.ok(f"requests/{settled}"))["limits"] == {"mode": "degraded", "met": [met]}


async def test_an_erased_adapter_and_an_erased_key_are_named_by_their_ids(reader: Reader) -> None:
    gone = uuid4()
    reader.settle(reader.used(adapter_id=gone, api_key_id=gone))
    (row,) = (await reader.ok("usage", {**RANGE, "group_by": "adapter,key"}))["data"]
    assert (row["adapter"], row["key_id"]) == (str(gone), str(gone))
    (request,) = (await reader.ok("requests", {"key_id": str(gone)}))["data"]
    assert (request["adapter"], request["key_id"]) == (str(gone), str(gone))


@pytest.mark.parametrize("odd", ["%00", "a%20b", "%F0%9F%98%80", "x" * 201])
async def test_an_odd_id_is_an_unknown_request(reader: Reader, odd: str) -> None:
    assert (await reader.http.get(f"requests/{odd}")).status_code == 404


async def test_no_row_of_another_tenant_is_read(readers: tuple[Reader, Reader]) -> None:
    mine, other = readers
    (theirs,) = other.settle(other.used(client_request_id="theirs", phases={"decode": [0, 1]}))
    assert (await mine.ok("usage"))["totals"]["requests"] == 0
    assert (await mine.ok("requests"))["data"] == []
    name = next(iter(other.tenant.keys))
    assert (await mine.ok("requests", {"key_id": name}))["data"] == []
    for path in (
        f"requests/{theirs}",
        "requests/theirs",
        f"requests/{theirs}/timeline",
        "requests/theirs/timeline",
    ):
        assert (await mine.http.get(path)).status_code == 404, path
        assert (await other.http.get(path)).status_code == 200, path
    page = await other.ok("usage", {**RANGE, "bucket": "1h", "limit": 1})
    assert page["totals"]["requests"] == 1
