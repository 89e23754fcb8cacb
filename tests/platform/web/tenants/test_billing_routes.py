"""`/operator/v1/tenants/{id}/billing` over HTTP: changed by name, without lost updates; a currency begins with a month."""

from datetime import UTC, date, datetime
from typing import Any

from sqlalchemy import text

from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.billing.rate_cards import RateCards
from loraplex.tenants.database import Database

NOTHING: dict[str, Any] = {
    "currency": "USD",
    "next_currency": None,
    "next_currency_from": None,
    "issuer": None,
    "customer_name": None,
    "customer_address": None,
    "vat_id": None,
    "tax_rate_ppm": 0,
    "minimum_micro": 0,
}
REFUSED: tuple[tuple[str, Any], ...] = (
    ("currency", "euro"),
    ("currency", None),
    ("issuer", ""),
    ("issuer", "a" * 1001),
    ("issuer", "a\rb"),
    ("customer_name", "a\nb"),
    ("vat_id", 5),
    ("tax_rate_ppm", 1_000_001),
    ("tax_rate_ppm", 0.19),
    ("tax_rate_ppm", None),
    ("minimum_micro", -1),
    ("minimum_micro", None),
    ("next_currency", "EUR"),
)


async def first_card(database: Database) -> None:
    async with database.as_operator() as session:
        await RateCards(session).create_first("USD", Price())


async def test_billing_data_are_changed_by_name(operator: Any, database: Database) -> None:
    await first_card(database)
    path, _ = await operator.tenant()
    fresh = await operator.get(f"{path}/billing")
    assert fresh.json() == NOTHING and fresh.headers["etag"] == '"1"'
    body = {
        "issuer": "loraplex Ltd\n1 Street\nTown",
        "customer_name": "Harbor GmbH",
        "customer_address": "2 Quay\nPort",
        "vat_id": "DE123456789",
        "tax_rate_ppm": 190_000,
        "minimum_micro": 5_000_000,
    }
    changed = await operator.patch(f"{path}/billing", body, fresh.headers["etag"])
    assert (changed.status_code, changed.json()) == (200, {**NOTHING, **body})
    late = await operator.patch(f"{path}/billing", {"vat_id": None}, fresh.headers["etag"])
    assert (late.status_code, late.json()["error"]["code"]) == (412, "precondition_failed")
    removed = await operator.patch(f"{path}/billing", {"vat_id": None}, changed.headers["etag"])
    shown = await operator.get(f"{path}/billing")
    assert (shown.content, shown.headers["etag"]) == (removed.content, removed.headers["etag"])
    assert shown.json() == {**NOTHING, **body, "vat_id": None}
    entries = (await operator.get("/audit?action=billing.change")).json()["data"]
    assert [entry["after"] for entry in entries] == [{"vat_id": None}, body]
    assert f"/{entries[0]['target']}" == f"{path}/billing"
    same = await operator.patch(f"{path}/billing", {"tax_rate_ppm": 190_000}, shown.headers["etag"])
    assert same.status_code == 200
    assert len((await operator.get("/audit?action=billing.change")).json()["data"]) == 2


async def test_a_used_tenant_changes_its_currency_with_a_month(operator: Any, database: Database) -> None:
    await first_card(database)
    path, key = await operator.tenant()
    at_once = await operator.patch(f"{path}/billing", {"currency": "EUR"}, '"1"')
    assert at_once.json() == {**NOTHING, "currency": "EUR"}
    async with database.as_writer() as session:
        await session.execute(text("UPDATE api_keys SET last_used_at = now()"))
    changed = await operator.patch(f"{path}/billing", {"currency": "GBP"}, at_once.headers["etag"])
    document = changed.json()
    assert (document["currency"], document["next_currency"]) == ("EUR", "GBP")
    begins = date.fromisoformat(document["next_currency_from"])
    assert begins.day == 1 and begins > datetime.now(UTC).date().replace(day=1)
    url = f"{operator.gateway.url}/tenant/v1/billing/rate-card"
    shown = (await operator.as_tenant("GET", url, key)).json()
    assert (shown["currency"], shown["next_currency"]) == ("EUR", "GBP")


async def test_invalid_billing_data_are_refused_by_name(operator: Any) -> None:
    path, _ = await operator.tenant()
    for name, value in REFUSED:
        response = await operator.patch(f"{path}/billing", {name: value}, '"1"')
        assert (response.status_code, response.json()["error"]["param"]) == (400, name), value
    unknown = "/tenants/00000000-0000-4000-8000-000000000000/billing"
    assert (await operator.get(unknown)).status_code == 404
    assert (await operator.patch(unknown, {}, '"1"')).status_code == 404
