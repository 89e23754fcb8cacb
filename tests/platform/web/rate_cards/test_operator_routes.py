"""`/operator/v1/rate-cards` over HTTP: versions follow each other, and neither the past nor a card in use changes."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import insert

from loraplex.tenants.database import Database
from loraplex.tenants.models import MonthlyRollup
from loraplex.tenants.models.usage import NO_ID

PRICES = {"prompt": 150_000, "cached_prompt": 75_000, "completion": 600_000}
ALL = {"scope": {"all": True}, "currency": "USD", "prices": PRICES}
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "currency"),
    ({"scope": {}}, "scope"),
    ({"scope": {"all": False}}, "scope.all"),
    ({"scope": {"all": True, "tier": "gold"}}, "scope"),
    ({"scope": {"adapter": "poet"}}, "scope"),
    ({"scope": {"tier": "gold", "tenant_id": str(uuid4())}}, "scope"),
    ({"scope": {"tier": "Gold"}}, "scope.tier"),
    ({"scope": {"tenant_id": "harbor"}}, "scope.tenant_id"),
    ({"currency": "usd"}, "currency"),
    ({"prices": {**PRICES, "prompt": 1.5}}, "prices.prompt"),
    ({"prices": {**PRICES, "prompt": "1"}}, "prices.prompt"),
    ({"prices": {**PRICES, "completion": -1}}, "prices.completion"),
    ({"prices": {**PRICES, "completion": 10_000_000_001}}, "prices.completion"),
    ({"prices": {**PRICES, "cached_prompt": 150_001}}, "cached_prompt"),
    ({"prices": {**PRICES, "reasoning": -1}}, "prices.reasoning"),
    ({"effective_from": "2030-01-31"}, "effective_from"),
    ({"effective_from": "2030-01-31T12:00:00"}, "effective_from"),
    ({"effective_from": 1_900_000_000}, "effective_from"),
    ({"effective_from": "9999-12-31T23:59:59-14:00"}, "effective_from"),
    ({"color": 1}, "color"),
)


def moment(document: dict[str, Any], name: str = "effective_from") -> datetime:
    return datetime.fromisoformat(document[name])


async def create(operator: Any, status: int = 201, **fields: Any) -> dict[str, Any]:
    response = await operator.post("/rate-cards", {**ALL, **fields})
    assert response.status_code == status, response.text
    document: dict[str, Any] = response.json()
    return document


async def test_a_version_is_created_and_ends_its_predecessor(operator: Any) -> None:
    asked = datetime.now(UTC)
    first = await create(operator)
    assert {name: first[name] for name in ("version", "scope", "currency", "prices", "effective_to")} == {
        **ALL,
        "prices": {**PRICES, "reasoning": None},
        "version": 1,
        "effective_to": None,
    }
    # Now is moved to when every gateway knows it.
    assert timedelta(seconds=2) <= moment(first) - asked < timedelta(seconds=60)
    later = (asked + timedelta(days=30)).isoformat()
    second = await create(operator, effective_from=later, prices={**PRICES, "reasoning": 900_000})
    assert second["prices"]["reasoning"] == 900_000
    assert (moment(second), second["version"]) == (asked + timedelta(days=30), 2)
    newest, oldest = (await operator.get("/rate-cards")).json()["data"]
    assert newest == second and oldest == {**first, "effective_to": second["effective_from"]}


async def test_the_past_and_a_moment_in_use_are_refused(operator: Any) -> None:
    begins = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    await create(operator, effective_from=begins)
    for refused in (begins, "2026-01-01T00:00:00Z"):
        error = (await create(operator, 409, effective_from=refused))["error"]
        assert error["code"] == "in_use"
    assert len((await operator.get("/rate-cards")).json()["data"]) == 1


async def test_every_scope_has_a_card_of_its_own_and_filters_find_it(operator: Any) -> None:
    path, _ = await operator.tenant()
    tenant_id = path.rpartition("/")[2]
    scopes = (
        {"all": True},
        {"tier": "gold"},
        {"tenant_id": tenant_id},
        {"tenant_id": tenant_id, "adapter": "poet"},
    )
    made = [await create(operator, scope=scope) for scope in scopes]
    assert [each["scope"] for each in made] == [*scopes] and {each["version"] for each in made} == {1}
    for query, found in (
        ("", made),
        ("?tier=gold", made[1:2]),
        (f"?tenant_id={tenant_id}", made[2:]),
        ("?adapter=poet", made[3:]),
        ("?currency=EUR", []),
        (f"?id={made[2]['id']}", made[2:3]),
    ):
        assert (await operator.get(f"/rate-cards{query}")).json()["data"] == found[::-1]
    page = (await operator.get("/rate-cards?limit=3")).json()
    rest = (await operator.get(f"/rate-cards?cursor={page['next_cursor']}")).json()
    assert (page["data"] + rest["data"], rest["next_cursor"]) == (made[::-1], None)


async def test_invalid_cards_are_refused_by_name(operator: Any) -> None:
    for fields, param in REFUSED:
        body = {**ALL, **fields} if fields else {"scope": ALL["scope"], "prices": PRICES}
        response = await operator.post("/rate-cards", body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), fields
    unknown = await create(operator, 404, scope={"tenant_id": str(uuid4())})
    assert unknown["error"]["code"] == "not_found"


async def test_a_repeated_creation_makes_one_version(operator: Any) -> None:
    first = await operator.post("/rate-cards", ALL, **{"idempotency-key": "k"})
    again = await operator.post("/rate-cards", ALL, **{"idempotency-key": "k"})
    assert (first.status_code, first.content) == (again.status_code, again.content) == (201, first.content)
    entries = (await operator.get("/audit?action=rate-card.create")).json()["data"]
    assert [entry["target"] for entry in entries] == [f"rate-cards/{first.json()['id']}"]
    assert entries[0]["after"]["completion"] == PRICES["completion"]


async def test_a_tenant_reads_the_cards_that_cover_it(operator: Any) -> None:
    path, key = await operator.tenant()
    tenant_id = path.rpartition("/")[2]
    mine = [
        await create(operator),
        await create(operator, scope={"tenant_id": tenant_id}),
        await create(operator, scope={"tenant_id": tenant_id, "adapter": "poet"}),
    ]
    other, _ = await operator.tenant("rival")
    of_other = await create(operator, scope={"tenant_id": other.rpartition("/")[2]})
    of_tier = await create(operator, scope={"tier": "gold"})
    await create(operator, currency="EUR")
    url = f"{operator.gateway.url}/tenant/v1/billing/rate-card"
    shown = (await operator.as_tenant("GET", url, key)).json()
    assert shown == {
        "data": mine[::-1],
        "next_cursor": None,
        "currency": "USD",
        "next_currency": None,
        "next_currency_from": None,
    }
    page = (await operator.as_tenant("GET", f"{url}?limit=2", key)).json()
    rest = (await operator.as_tenant("GET", f"{url}?cursor={page['next_cursor']}", key)).json()
    assert page["data"] + rest["data"] == mine[::-1]
    # Usage of a former tier names a version that covers the tenant no more; what is another tenant's stays hidden.
    for version_id, found in ((of_tier["id"], [of_tier]), (of_other["id"], []), (str(uuid4()), [])):
        assert (await operator.as_tenant("GET", f"{url}?id={version_id}", key)).json()["data"] == found
    wrong = await operator.as_tenant("GET", f"{url}?id=x", key)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "id")
    no_scope = await operator.as_tenant("GET", url, operator.gateway.key)
    assert (no_scope.status_code, no_scope.json()["error"]["code"]) == (403, "insufficient_scope")
    with_it = await operator.gateway.tenant("reader", ("billing:read",))
    assert (await operator.as_tenant("GET", url, with_it)).json()["data"] == mine[:1]


async def test_a_preview_rates_last_month_and_writes_nothing(operator: Any, database: Database) -> None:
    this_month = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    last_month = (this_month - timedelta(hours=1)).replace(day=1, hour=0)
    ids = sorted([(await operator.tenant(name))[0].rpartition("/")[2] for name in ("harbor", "island")])
    async with database.as_writer() as session:
        for tenant_id, tokens, month in (
            (ids[0], 10, last_month),
            (ids[1], 20, last_month),
            (ids[1], 40, this_month),
        ):
            await session.execute(
                insert(MonthlyRollup).values(
                    tenant_id=UUID(tenant_id),
                    month=month,
                    adapter_id=NO_ID,
                    price_version_id=NO_ID,
                    currency="USD",
                    requests=1,
                    uncached_tokens=tokens,
                    cached_tokens=0,
                    completion_tokens=1,
                    amount_pico=tokens,
                )
            )
    draft = {**ALL, "prices": {"prompt": 2, "cached_prompt": 1, "completion": 5}}
    document = (await operator.post("/rate-cards/preview", draft)).json()
    assert document["month"] == last_month.strftime("%Y-%m") and document["next_cursor"] is None
    assert [(each["tenant_id"], each["billed_pico"], each["draft_pico"]) for each in document["data"]] == [
        (ids[0], "10", "25"),
        (ids[1], "20", "45"),
    ]
    assert document["totals"] == [{"currency": "USD", "billed_pico": "30", "draft_pico": "70"}]
    one = {**draft, "scope": {"tenant_id": ids[1]}, "month": this_month.strftime("%Y-%m")}
    one["effective_from"] = "2030-01-31T12:00:00Z"
    assert (await operator.post("/rate-cards/preview", one)).json()["totals"][0]["draft_pico"] == "85"
    first = (await operator.post("/rate-cards/preview?limit=1", draft)).json()
    rest = (await operator.post(f"/rate-cards/preview?cursor={first['next_cursor']}", draft)).json()
    assert first["data"] + rest["data"] == document["data"] and first["totals"] == document["totals"]
    assert (await operator.get("/rate-cards")).json()["data"] == []
    assert (await operator.get("/audit?action=rate-card.create")).json()["data"] == []


async def test_an_invalid_month_and_an_unknown_tier_are_refused(operator: Any) -> None:
    unknown = await operator.post("/rate-cards/preview", {**ALL, "scope": {"tier": "glod"}})
    assert unknown.status_code == 400 and unknown.json()["error"]["param"] == "tier"
    assert "there is no tier glod" in unknown.json()["error"]["message"]
    for month in ("2026-13", "2026-1", "26-01", "0000-01", "9999-12", "2100-01", 202610):
        response = await operator.post("/rate-cards/preview", {**ALL, "month": month})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "month"), month
