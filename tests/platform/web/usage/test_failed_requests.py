"""Requests that failed or were refused are listed once, found by their ids, and hold nothing of what was sent."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, text
from tests.platform.web.browser import Console
from tests.platform.web.gateway import BASE_MODEL
from tests.platform.web.limited_gateway import limited
from tests.platform.web.observed_tenant import ObservedTenant, observed_tenant
from tests.tenants.ledger.test_request_reports import fail

from loraplex.engine.fake_engine import FakeScript, Fault
from loraplex.engine.messages import Failed
from loraplex.grammar.errors import AnalysisFailed, GrammarInvalid
from loraplex.platform.errors import EngineFailed, UnknownParameter
from loraplex.platform.observability.failed_requests import summary_of
from loraplex.platform.parameters.value_errors import invalid_value
from loraplex.tenants.database import Database
from loraplex.tenants.ledger.request_log import RequestFilters, RequestLog
from loraplex.tenants.models import FailedRequest

MARK = "zebra-4711"
HI = [{"role": "user", "content": "hi"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": MARK, MARK: 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"$ref": f"#/{MARK}"}}}
CHATS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"model": f"{MARK} {MARK}"}, "No adapter, alias or version has the name that was asked for (`model`)."),
    ({MARK: 1}, "Unknown parameter."),
    ({"temperature": MARK}, "`temperature` must be a number in 0..2."),
    ({"temperature": 47.11}, "`temperature` must be a number in 0..2."),
    ({"stop": [MARK, 4711]}, "`stop`"),
    ({"logit_bias": {MARK: 4711}}, "`logit_bias`"),
    ({"metadata": {MARK: [MARK]}}, "`metadata`"),
    ({"messages": [{"role": MARK, "content": MARK}]}, "`messages[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": MARK}]}]},
        "Unsupported parameter (`messages[0].content",
    ),
    ({"messages": [{"role": "user", "content": MARK, MARK: 1}]}, "Unknown parameter (`messages[0]`)."),
    ({"tools": [{"type": MARK}]}, "`tools"),
    ({"tools": [TOOL]}, ""),
    ({"tool_choice": {"type": "function", "function": {"name": MARK}}}, "`tool_choice`"),
    ({"chat_template_kwargs": {MARK: MARK}}, "`chat_template_kwargs"),
    ({"response_format": FORMAT}, "The schema, the regular expression or the grammar is not valid"),
    ({"response_format": {"type": MARK}}, "`response_format"),
)
RAW = (b'{"zebra-4711": zebra-4711}', b"[4711]", b'{"zebra-4711": 1, "zebra-4711": 2}')


async def rows_of(gateway: Any) -> list[FailedRequest]:
    await gateway.admissions.maintenance.failed_requests.flush()
    await gateway.admissions.maintenance.shipping.ship()
    async with gateway.database.as_operator() as session:
        return [*await session.scalars(select(FailedRequest).order_by(FailedRequest.id))]


async def test_nothing_that_was_sent_is_kept(start_gateway: Any, database: Database, valkey_url: str) -> None:
    async with limited(start_gateway, database, valkey_url, tokens_per_day=10_000) as (gateway, http):
        for number, (body, _) in enumerate(CHATS):
            chat = {"model": BASE_MODEL, "messages": HI, **body}
            response = await gateway.post("/v1/chat/completions", chat, **{"x-request-id": f"mine-{number}"})
            assert 400 <= response.status_code < 500, (body, response.text)
        for raw in RAW:
            assert (await gateway.post("/v1/messages", raw)).status_code == 400
        rows = await rows_of(gateway)
        assert len(rows) == len(CHATS) + len(RAW)
        for (body, begin), row in zip(CHATS, rows, strict=False):
            assert row.message.startswith(begin) or begin in row.message, (body, row.message)
        assert [row.message for row in rows if "4711" in row.message or "zebra" in row.message] == []
        assert rows[0].model is None and rows[1].model == BASE_MODEL
        listed = (await http.get("requests", params={"outcome": "refused"})).json()["data"]
        assert [each["client_request_id"] for each in listed[len(RAW) :]][::-1] == [
            f"mine-{number}" for number in range(len(CHATS))
        ]
        assert "4711" not in str([{**each, "id": "", "at": ""} for each in listed])
        one = (await http.get("requests/mine-2")).json()
        assert (one["code"], one["status"], one["model"]) == ("invalid_value", 400, BASE_MODEL)


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (
            GrammarInvalid(f"the grammar does not compile: {MARK}", param=f"tools[0].function.{MARK}"),
            "tools[0].function`).",
        ),
        (
            AnalysisFailed(f"KeyError {MARK}", param=f".{MARK}"),
            "The schema has something that cannot be enforced.",
        ),
        (
            EngineFailed(Failed("r", "invalid_request", MARK, MARK)),
            "A parameter has a value that is not allowed.",
        ),
        (EngineFailed(Failed("r", "grammar_failed", f"at “{MARK}”")), "Grammar failed."),
        (UnknownParameter(f"Unknown parameter `{MARK}`.", MARK), "Unknown parameter."),
        (
            invalid_value(f"metadata.{MARK}", MARK, "a string"),
            "A parameter has a value that is not allowed (`metadata`).",
        ),
        (RuntimeError(MARK), "Internal error."),
    ],
)
def test_a_message_is_replaced_by_what_is_known_here(error: Exception, kept: str) -> None:
    summary = summary_of(error)
    assert summary.endswith(kept) and MARK not in summary


async def test_a_refusal_names_its_limit_and_a_failure_is_listed_once(
    start_gateway: Any, database: Database, valkey_url: str
) -> None:
    broken = FakeScript(faults=(Fault(kind="nan", after_tokens=3),))
    async with limited(start_gateway, database, valkey_url, broken, requests_per_minute=2) as (gateway, http):
        chat = {"model": BASE_MODEL, "messages": HI, "max_tokens": 5}
        for stream in (False, True):
            await gateway.post("/v1/chat/completions", {**chat, "stream": stream})
        for number in range(2):
            limited_ = await gateway.post(
                "/v1/chat/completions", chat, **{"x-request-id": f"limited-{number}"}
            )
            assert limited_.status_code == 429
        rows = await rows_of(gateway)
        assert [(row.is_refused, row.status) for row in rows] == [(False, 500)] * 2 + [(True, 429)] * 2
        assert rows[2].message.startswith("requests_per_minute of the tenant is 2: 2 used")
        assert [row.model for row in rows[2:]] == [BASE_MODEL, None], "the second was refused before its body"
        listed = (await http.get("requests")).json()["data"]
        assert [(each["outcome"], each["code"]) for each in listed] == [
            ("refused", "rate_limit_exceeded"),
            ("refused", "rate_limit_exceeded"),
            ("failed", rows[1].code),
            ("failed", rows[0].code),
        ]


async def test_a_revoked_key_is_known_and_a_wrong_one_is_not(
    start_gateway: Any, database: Database, valkey_url: str
) -> None:
    async with limited(start_gateway, database, valkey_url) as (gateway, _):
        chat = {"model": BASE_MODEL, "messages": HI}
        for revoked in (False, True):
            if revoked:
                async with database.as_operator() as session:
                    await session.execute(text("UPDATE api_keys SET revoked_at = now()"))
            for key in ("lpx_nothing", gateway.key):
                await gateway.post("/v1/chat/completions", chat, authorization=f"Bearer {key}")
        rows = await rows_of(gateway)
        assert [(row.code, row.key_id) for row in rows] == [("invalid_api_key", gateway.key.split("_")[2])]


async def pages(seen: ObservedTenant, database: Database, filters: RequestFilters, limit: int) -> list[Any]:
    """All requests that match, page by page; each page is found again from the one behind it."""
    found, after = list[Any](), None
    async with database.as_tenant(seen.id) as session:
        log = RequestLog(session, seen.id)
        while True:
            page = await log.page(filters, after, limit)
            found += page.requests
            after = page.more_after
            if after is None:
                return found


@pytest.mark.parametrize("limit", [1, 2, 3, 50])
async def test_pages_have_both_in_the_order_of_time(database: Database, limit: int) -> None:
    seen, other = observed_tenant(database.url), observed_tenant(database.url)
    times = [seen.now - timedelta(minutes=each) for each in (200, 90, 30, 29, -1)]
    refused = [fail(database.url, seen.tenant, at, "invalid_value", model="coral") for at in times]
    fail(database.url, other.tenant, times[0], "invalid_value")
    fail(database.url, seen.tenant, seen.now, "adapter_error", id=seen.requests[2], is_refused=False)
    every = sorted([*seen.requests, *refused], reverse=True)
    assert [each.id for each in await pages(seen, database, RequestFilters(), limit)] == every
    for filters, number in (
        (RequestFilters(outcome="refused"), 5),
        (RequestFilters(outcome="failed"), 1),
        (RequestFilters(adapter="coral"), 6),
        (RequestFilters(base_model=BASE_MODEL), 1),
        (RequestFilters(key_id=seen.key_id), 10),
        (RequestFilters(key_id="other"), 0),
        (RequestFilters(start=times[2]), 4),
        (RequestFilters(end=times[0]), 0),
        (RequestFilters(slower_than_ms=0), 5),
    ):
        assert len(await pages(seen, database, filters, limit)) == number, filters


async def test_the_page_of_a_refused_request_and_the_search(console: Console, database: Database) -> None:
    seen = observed_tenant(database.url)
    browser, now = await console.signed_in("viewer", seen.tenant.name), datetime.now(UTC)
    refused = fail(database.url, seen.tenant, now, "rate_limit_exceeded", status=429, omitted=7)
    text_of_row = (await browser.page("/console/requests")).texts("tbody tr")[0]
    assert "429 rate_limit_exceeded" in text_of_row and "and 7 more in this minute" in text_of_row
    assert "No." in text_of_row
    page = await browser.page(f"/console/requests/{refused}")
    assert page.find("h1").text() == "429 rate_limit_exceeded"
    assert page.find("a[href='/console/limits/explain?request=mine']")
    assert page.find("form[role=search] input").attributes["name"] == "request"
    for asked in ("mine", str(refused), "mine-1"):
        found = await browser.get(f"/console/requests?request={asked}")
        assert found.headers["location"] == f"/console/requests/{asked}"
    nothing = await browser.page("/console/requests?request=none")
    assert "has the id none, and none that was refused in the last 24 hours. Lists cut ids" in nothing.text
    fail(
        database.url,
        seen.tenant,
        now,
        "adapter_error",
        id=seen.requests[2],
        is_refused=False,
        status=500,
        omitted=3,
    )
    page = await browser.page(f"/console/requests/{seen.requests[2]}")
    assert "500 adapter_error. No. 3 more requests of this key got this error" in page.text
