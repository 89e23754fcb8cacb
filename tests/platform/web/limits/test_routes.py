"""Quotas over HTTP on real stores: use, narrower limits, explanations of refusals, threshold events."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import httpx
import pytest
from sqlalchemy import select
from tests.platform.web.limited_gateway import limited

from loraplex.engine.fake_engine import FakeScript
from loraplex.platform.tenant_limiter import AT_ONCE
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.counters.counter_replies import Decision, Explanation, LimitUse, UnknownLimit
from loraplex.tenants.database import Database
from loraplex.tenants.models import RequestPhases, RequestRollup, UsageRecord
from loraplex.tenants.quotas.limits import Subject

BODY: Any = {"model": "demo/base", "prompt": [[1, 2, 3, 4]], "max_tokens": 6}


async def usage_records(database: Database) -> list[tuple[str, int, int, int]]:
    """Outcome, prompt, cached and completion tokens of every settled request."""
    columns = (
        UsageRecord.outcome,
        UsageRecord.uncached_tokens + UsageRecord.cached_tokens,
        UsageRecord.cached_tokens,
        UsageRecord.completion_tokens,
    )
    async with database.as_operator() as session:
        return [(row[0], row[1], row[2], row[3]) for row in await session.execute(select(*columns))]


def use(document: Any, name: str) -> tuple[int | None, int | None, int | None]:
    limit = document["limits"][name]
    return limit["limit"], limit["used"], limit["reserved"]


async def test_limits_and_their_use(start_gateway: Any, database: Database, valkey_url: str) -> None:
    limits = {"requests_per_minute": 60, "tokens_per_day": 20, "budget_per_month": 1000, "max_keys": 5}
    async with limited(start_gateway, database, valkey_url, **limits) as (gateway, http):
        assert (await gateway.post("/v1/completions", BODY)).status_code == 200
        response = await http.get("quotas")
        document = response.json()
        assert document["currency"] == "USD"
        (tenant,) = document["data"]
        assert (tenant["level"], tenant["name"], tenant["revision"]) == ("tenant", "boss", 1)
        assert use(tenant, "tokens_per_day") == (20, 10, 0)
        # 2 tokens of 1, 2 cached of a half, 6 of 2 micro-units each.
        assert use(tenant, "budget_per_month") == (1000, 15, 0)
        assert use(tenant, "max_keys") == (5, 1, 0) and use(tenant, "max_adapters") == (10_000, 0, 0)
        assert use(tenant, "max_adapter_bytes") == (16 << 30, 0, 0)
        assert tenant["limits"]["tokens_per_day"]["resets_at"].endswith("T00:00:00Z")


async def test_a_request_is_in_the_ledger_with_its_id_and_its_times(
    start_gateway: Any, database: Database, valkey_url: str
) -> None:
    async with limited(start_gateway, database, valkey_url, tokens_per_day=20) as (gateway, _):
        response = await gateway.post("/v1/completions", BODY, **{"x-request-id": "mine-1"})
        assert response.headers["x-request-id"] == "mine-1"
    async with database.as_operator() as session:
        (record,) = await session.scalars(select(UsageRecord))
        (rollup,) = await session.scalars(select(RequestRollup))
        (phases,) = await session.scalars(select(RequestPhases))
    assert (record.client_request_id, record.currency) == ("mine-1", "USD")
    assert record.ttft_ms is not None and record.duration_ms is not None
    assert 0 <= record.ttft_ms <= record.duration_ms
    assert (rollup.status, rollup.requests, sum(rollup.ttft_buckets)) == ("completed", 1, 1)
    assert sum(rollup.gap_buckets) == record.completion_tokens - 1
    assert phases.id == record.id and {"auth", "admission", "decode"} <= phases.phases.keys()
    assert sum(duration for _, duration, *_ in phases.phases.values()) == record.duration_ms


@pytest.mark.parametrize("computed", [0, 3])
async def test_a_client_that_leaves_during_prefill_pays_for_what_was_computed(
    start_gateway: Any, database: Database, valkey_url: str, computed: int
) -> None:
    script = FakeScript(start_delay_s=60, prefilled_tokens=computed, cached_tokens=2)
    limits = {"tokens_per_day": 20, "budget_per_month": 1000}
    async with limited(start_gateway, database, valkey_url, script, **limits) as (gateway, http):
        leaving = asyncio.create_task(gateway.post("/v1/completions", BODY))
        async with asyncio.timeout(60):
            while not gateway.engine.running:
                await asyncio.sleep(0.005)
            leaving.cancel()
            while not (records := await usage_records(database)):
                await asyncio.sleep(0.01)
            cached = min(computed, 2)
            assert records == [("aborted", computed, cached, 0)]
            while use((tenant := (await http.get("quotas")).json()["data"][0]), "tokens_per_day")[2]:
                await asyncio.sleep(0.01)
        assert use(tenant, "tokens_per_day") == (20, computed, 0)
        assert use(tenant, "budget_per_month") == (1000, computed - cached + cached // 2, 0)


async def test_quotas_come_in_pages(start_gateway: Any, database: Database, valkey_url: str) -> None:
    async with limited(start_gateway, database, valkey_url, max_keys=9) as (gateway, http):
        ids = [(await http.post("keys", json={"name": "app"})).json()["id"] for _ in range(4)]
        for name in ("b", "a"):
            await gateway.adapter("boss", name, "a" * 64)
        for path in (*(f"keys/{each}" for each in ids), "adapters/a", "adapters/b"):
            put = await http.put(
                f"{path}/quotas", json={"requests_per_minute": 5}, headers={"if-match": '"1"'}
            )
            assert put.status_code == 200
        assert (await http.delete(f"keys/{ids.pop()}")).status_code == 204
        wanted = ["boss", *sorted(ids), "a", "b"]
        for limit in (1, 2, 4, 6, 100):
            seen: list[Any] = []
            cursor: dict[str, str] = {}
            while True:
                page = (await http.get("quotas", params={"limit": limit, **cursor})).json()
                assert len(page["data"]) <= limit and page["currency"] == "USD"
                seen += page["data"]
                if page["next_cursor"] is None:
                    break
                cursor = {"cursor": page["next_cursor"]}
            assert [each["name"] for each in seen] == wanted
            assert [each["level"] for each in seen] == ["tenant", *["key"] * 3, *["adapter"] * 2]
            assert use(seen[0], "max_keys") == (9, 4, 0)
            assert all(use(each, "requests_per_minute") == (5, 0, 0) for each in seen[1:])
        for wrong in ({"limit": "101"}, {"cursor": "x"}, {"page": "2"}):
            assert (await http.get("quotas", params=wrong)).status_code == 400


async def test_a_key_shares_the_limits_of_the_key_that_minted_it(
    start_gateway: Any, database: Database, valkey_url: str
) -> None:
    async with limited(start_gateway, database, valkey_url, max_keys=9) as (gateway, http):
        scopes = ["inference", "keys:write", "usage:read"]
        root = (await http.post("keys", json={"name": "root", "scopes": scopes})).json()
        assert root["parent_id"] == root["created_by"] and root["limit_root"] is None
        bearer = {"authorization": f"Bearer {root['api_key']}"}
        child = (await http.post("keys", json={"name": "child"}, headers=bearer)).json()
        assert (child["parent_id"], child["limit_root"]) == (root["id"], None)
        put = await http.put(
            f"keys/{root['id']}/quotas", json={"requests_per_minute": 1}, headers={"if-match": '"1"'}
        )
        assert put.status_code == 200
        shown = {
            each: (await http.get(f"keys/{each}")).json()["limit_root"] for each in (root["id"], child["id"])
        }
        assert set(shown.values()) == {root["id"]}
        mine = {"authorization": f"Bearer {child['api_key']}"}
        assert (await gateway.post("/v1/completions", BODY, **mine)).status_code == 200
        refused = await gateway.post("/v1/completions", BODY, **mine, **{"x-request-id": "too-many"})
        assert refused.status_code == 429
        assert refused.headers["x-loraplex-limit-level"] == "group"
        assert "requests_per_minute of the group is 1" in refused.json()["error"]["message"]
        assert refused.headers["x-ratelimit-limit-requests"] == "1"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        (decision,) = (await http.get("limits/explain/too-many")).json()["decisions"]
        assert (decision["level"], decision["limit"], decision["passed"]) == ("group", 1, False)
        assert (await http.delete(f"keys/{root['id']}")).status_code == 204
        _, group = (await http.get("quotas")).json()["data"]
        assert (group["level"], group["name"]) == ("group", root["id"])
        assert use(group, "requests_per_minute")[:2] == (1, 1) and use(group, "tokens_per_day")[1] == 10
        assert (await gateway.post("/v1/completions", BODY, **mine)).status_code == 429
        assert (await http.delete(f"keys/{child['id']}")).status_code == 204
        assert len((await http.get("quotas")).json()["data"]) == 1


async def test_reading_quotas_waits_for_a_slot_and_keeps_no_connection(
    start_gateway: Any, database: Database
) -> None:
    gateway = await start_gateway()
    key = await gateway.tenant("boss", ("tenant:admin",))
    reading, most, go_on = 0, 0, asyncio.Event()

    async def slow(tenant_id: UUID, subjects: Sequence[Subject]) -> Sequence[LimitUse]:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        await go_on.wait()
        reading -= 1
        return []

    gateway.admissions.quotas = slow
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=f"{gateway.url}/tenant/v1", headers=headers) as http:
        asked = [asyncio.create_task(http.get("quotas")) for _ in range(3 * AT_ONCE)]
        async with asyncio.timeout(60):
            while reading < AT_ONCE:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert gateway.database._engine.pool.checkedout() == 0
        go_on.set()
        assert [response.status_code for response in await asyncio.gather(*asked)] == [200] * 3 * AT_ONCE
    assert most == AT_ONCE


async def test_a_spent_budget_is_refused_explained_and_reported(
    start_gateway: Any, database: Database, valkey_url: str
) -> None:
    async with limited(start_gateway, database, valkey_url, tokens_per_day=12) as (gateway, http):
        assert (await gateway.post("/v1/completions", BODY)).status_code == 200
        response = await gateway.post("/v1/completions", BODY, **{"x-request-id": "too-much"})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "insufficient_quota")
        assert response.headers["x-loraplex-limit"] == "tokens_per_day"
        assert response.headers["x-should-retry"] == "false" and int(response.headers["retry-after"]) >= 1
        explanation = (await http.get("limits/explain/too-much")).json()
        assert (explanation["request_id"], explanation["mode"]) == ("too-much", "counted")
        (decision,) = explanation["decisions"]
        assert (decision["used"], decision["asked"], decision["passed"]) == (10, 10, False)
        for unknown in ("never", "x" * 300):
            assert (await http.get(f"limits/explain/{unknown}")).status_code == 404
        (event,) = await events_when_shipped(http)
        assert (event["limit_name"], event["threshold"], event["used"]) == ("tokens_per_day", 80, 10)
        assert (event["level"], event["limit"]) == ("tenant", 12)


async def events_when_shipped(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    """The threshold events, once usage has reached the ledger."""
    async with asyncio.timeout(60):
        while True:
            found: list[dict[str, Any]] = (await http.get("events")).json()["data"]
            if found:
                return found
            await asyncio.sleep(0.02)


async def test_every_prompt_and_choice_is_a_concurrent_request(
    start_gateway: Any, database: Database, valkey_url: str
) -> None:
    async with limited(start_gateway, database, valkey_url, concurrent_requests=6) as (gateway, _):
        for prompts, n, status in ((3, 2, 200), (1, 6, 200), (7, 1, 400), (4, 2, 400)):
            response = await gateway.post("/v1/completions", BODY | {"prompt": [[1]] * prompts, "n": n})
            assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error["param"] == "n" and "`n` is 8" in error["message"]
        assert "at most 6: `concurrent_requests` of the tenant" in error["message"]
        assert gateway.engine.running == 0


async def test_a_degraded_refusal_is_explained_as_such(start_gateway: Any) -> None:
    gateway = await start_gateway()
    key = await gateway.tenant("boss", ("tenant:admin",))
    async with gateway.database.as_operator() as session:
        tenant = await TenantRepository(session).get("boss")
    shared = Decision(
        level="tenant",
        name="requests_per_minute",
        limit=30,
        used=30,
        reserved=0,
        asked=1,
        passed=False,
        retry_after_s=2.0,
    )
    unknown = UnknownLimit(level="key", name="tokens_per_day", limit=500, asked=30)
    gateway.admissions.explanations[tenant.id, "r"] = Explanation(
        request_id="r", at=datetime.now(UTC), decisions=(shared,), unknown=(unknown,), degraded=True
    )
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=f"{gateway.url}/tenant/v1", headers=headers) as http:
        document = (await http.get("limits/explain/r")).json()
    assert document["mode"] == "degraded"
    by_share, unknown = document["decisions"]
    assert (by_share["limit"], by_share["used"]) == (30, 30)
    assert (unknown["name"], unknown["limit"], unknown["asked"]) == ("tokens_per_day", 500, 30)
    assert (unknown["used"], unknown["reserved"], unknown["passed"]) == (None, None, False)


async def test_narrower_limits_of_keys_and_adapters_apply_at_once(
    start_gateway: Any, database: Database, valkey_url: str
) -> None:
    async with limited(start_gateway, database, valkey_url, requests_per_minute=60) as (gateway, http):
        await gateway.adapter("boss", "pirate", "a" * 64)
        path = f"keys/{gateway.key.split('_')[2]}/quotas"
        assert (await gateway.post("/v1/completions", BODY)).status_code == 200
        before = await http.get(path)
        assert before.json()["requests_per_minute"] is None and before.headers["etag"] == '"1"'
        seen = {"if-match": before.headers["etag"]}
        response = await http.put(path, json={"requests_per_minute": 1}, headers=seen)
        assert (response.status_code, response.headers["etag"]) == (200, '"2"'), response.text
        assert (await gateway.post("/v1/completions", BODY)).status_code == 200
        refused = await gateway.post("/v1/completions", BODY)
        assert refused.status_code == 429 and refused.headers["x-loraplex-limit-level"] == "key"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        response = await http.put(
            "adapters/pirate/quotas", json={"concurrent_requests": 0}, headers={"if-match": '"1"'}
        )
        assert response.status_code == 200
        levels = [each["level"] for each in (await http.get("quotas")).json()["data"]]
        assert levels == ["tenant", "key", "adapter"]
        actions = [each["action"] for each in (await http.get("audit")).json()["data"]]
        assert actions == ["quotas.change"] * 2


async def test_limits_that_are_not_narrower_are_refused(
    start_gateway: Any, database: Database, valkey_url: str
) -> None:
    seen = {"if-match": '"1"'}
    cases: list[tuple[Any, dict[str, str], int, str | None]] = [
        ({"requests_per_minute": 61}, seen, 400, "requests_per_minute"),
        ({"max_keys": 1}, seen, 400, "max_keys"),
        ({"default_max_tokens": 1}, seen, 400, "default_max_tokens"),
        ({"tokens_per_day": -1}, seen, 400, "tokens_per_day"),
        ({"tokens_per_day": "1"}, seen, 400, "tokens_per_day"),
        ({}, {}, 428, None),
        ({}, {"if-match": '"2"'}, 412, None),
    ]
    async with limited(start_gateway, database, valkey_url, requests_per_minute=60) as (gateway, http):
        path = f"keys/{gateway.key.split('_')[2]}/quotas"
        for body, headers, status, param in cases:
            response = await http.put(path, json=body, headers=headers)
            assert (response.status_code, response.json()["error"]["param"]) == (status, param), body
        assert (await http.get(path)).headers["etag"] == '"1"'


async def test_resources_of_another_tenant_do_not_exist(
    start_gateway: Any, database: Database, valkey_url: str
) -> None:
    async with limited(start_gateway, database, valkey_url) as (gateway, http):
        rival = await gateway.tenant("rival", ("tenant:admin",))
        await gateway.adapter("rival", "pirate", "a" * 64)
        for path in (f"keys/{rival.split('_')[2]}/quotas", "adapters/pirate/quotas", "keys/%00/quotas"):
            assert (await http.get(path)).status_code == 404
            put = await http.put(path, json={}, headers={"if-match": '"1"'})
            assert put.status_code == 404


async def test_a_key_with_fewer_rights_cannot_narrow_another(
    start_gateway: Any, database: Database, valkey_url: str
) -> None:
    async with limited(start_gateway, database, valkey_url) as (gateway, http):
        body = {"name": "helper", "scopes": ["keys:write"]}
        helper = (await http.post("keys", json=body)).json()
        headers = {"authorization": f"Bearer {helper['api_key']}", "if-match": '"1"'}
        boss = f"keys/{gateway.key.split('_')[2]}/quotas"
        response = await http.put(boss, json={"requests_per_minute": 0}, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "insufficient_scope")
        assert (await http.get(boss)).json()["requests_per_minute"] is None
        own = await http.put(f"keys/{helper['id']}/quotas", json={"requests_per_minute": 5}, headers=headers)
        assert own.status_code == 200


async def test_a_key_widens_neither_itself_nor_what_it_mints(
    start_gateway: Any, database: Database, valkey_url: str
) -> None:
    async with limited(start_gateway, database, valkey_url) as (gateway, http):
        path = f"keys/{gateway.key.split('_')[2]}/quotas"
        narrow = {"requests_per_minute": 2, "tokens_per_day": 100}
        assert (await http.put(path, json=narrow, headers={"if-match": '"1"'})).status_code == 200
        widened = await http.put(path, json={}, headers={"if-match": '"2"'})
        assert widened.status_code == 200 and widened.json() == widened.json() | narrow
        for body in ({"requests_per_minute": 3}, {"tokens_per_day": 101}):
            refused = await http.put(path, json=body, headers={"if-match": widened.headers["etag"]})
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (403, "insufficient_scope")
            assert error["param"] == next(iter(body))
        minted = (await http.post("keys", json={"name": "child"})).json()
        limits = await http.get(f"keys/{minted['id']}/quotas")
        assert limits.json() == limits.json() | narrow
        nulled = {"requests_per_minute": None, "tokens_per_day": 15}
        seen = {"if-match": limits.headers["etag"]}
        child = (await http.put(f"keys/{minted['id']}/quotas", json=nulled, headers=seen)).json()
        assert (child["requests_per_minute"], child["tokens_per_day"]) == (2, 15)
        gateway.key = minted["api_key"]
        statuses = [(await gateway.post("/v1/completions", BODY)).status_code for _ in range(2)]
        assert statuses == [200, 429]


async def test_limits_of_a_key_set_those_of_the_keys_it_replaced(
    start_gateway: Any, database: Database, valkey_url: str
) -> None:
    """Except a limit that was set apart, unless the new one is narrower. A replaced key sets its own alone. Each has its entry."""
    async with limited(start_gateway, database, valkey_url) as (_, http):
        old = (await http.post("keys", json={"name": "worker"})).json()["id"]

        async def put(key: str, **limits: int) -> None:
            seen = (await http.get(f"keys/{key}/quotas")).headers["etag"]
            response = await http.put(f"keys/{key}/quotas", json=limits, headers={"if-match": seen})
            assert response.status_code == 200, response.text

        async def both() -> list[tuple[int | None, int | None]]:
            found = [(await http.get(f"keys/{each}/quotas")).json() for each in (old, new)]
            return [(each["requests_per_minute"], each["tokens_per_day"]) for each in found]

        await put(old, requests_per_minute=50, tokens_per_day=90)
        new = (await http.post(f"keys/{old}/rotate", json={"grace_seconds": 600})).json()["id"]
        await put(new, requests_per_minute=60, tokens_per_day=90)
        assert await both() == [(60, 90), (60, 90)]
        await put(old, requests_per_minute=10, tokens_per_day=90)
        assert await both() == [(10, 90), (60, 90)]
        await put(new, requests_per_minute=70, tokens_per_day=80)
        assert await both() == [(10, 80), (70, 80)]
        await put(new, requests_per_minute=5)
        assert await both() == [(5, None), (5, None)]
        entries = [
            each for each in (await http.get("audit")).json()["data"] if each["action"] == "quotas.change"
        ]
        targets = [each["target"].split("/")[1] for each in entries]
        assert sorted(targets[:2]) == sorted(targets[2:4]) == sorted(targets[5:7]) == sorted([old, new])
        assert (targets[4], targets[7:]) == (old, [old])
        changed = {each["target"].split("/")[1]: each["after"] for each in entries[2:4]}
        assert changed[old] == {"tokens_per_day": 80}


async def test_resource_counts_match_the_limits(
    start_gateway: Any, database: Database, valkey_url: str
) -> None:
    async with limited(start_gateway, database, valkey_url, max_adapter_bytes=1000, max_keys=5) as (
        gateway,
        http,
    ):
        await gateway.adapter("boss", "pirate", "a" * 64)
        for alias in (await http.get("adapters/pirate/aliases")).json()["data"]:
            await http.delete(f"adapters/pirate/aliases/{alias['alias']}")
        size = (await http.get("adapters/pirate/versions/1")).json()["size_bytes"]
        assert (await http.delete("adapters/pirate")).status_code == 204
        key = (await http.post("keys", json={"name": "app"})).json()["id"]
        assert (await http.post(f"keys/{key}/rotate", json={"grace_seconds": 60})).status_code == 201
        (tenant,) = (await http.get("quotas")).json()["data"]
        # The files of a deleted version take room until they are removed; a replaced key takes no place of a new one.
        assert size > 0 and use(tenant, "max_adapter_bytes") == (1000, size, 0)
        assert use(tenant, "max_keys") == (5, 2, 0)


async def test_budgets_are_in_the_currency_of_the_tenant(start_gateway: Any) -> None:
    asked = list[UUID]()

    def currency_of(tenant_id: UUID) -> str:
        asked.append(tenant_id)
        return "EUR"

    gateway = await start_gateway(currency_of=currency_of)
    key = await gateway.tenant("boss", ("tenant:admin",))
    shown = await gateway.get("/tenant/v1/quotas", [("authorization", f"Bearer {key}")])
    async with gateway.database.as_operator() as session:
        tenant = await TenantRepository(session).get("boss")
    assert (shown.json()["currency"], asked) == ("EUR", [tenant.id])
