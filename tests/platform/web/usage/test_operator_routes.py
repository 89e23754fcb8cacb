"""Usage across tenants over HTTP."""

from datetime import UTC, datetime
from uuid import uuid4

from tests.platform.web.operator_client import Operator
from tests.tenants.ledger.stored_usage import Used, UsingTenant, make_tenant, settle

AT = datetime(2026, 10, 31, 23, tzinfo=UTC)
RANGE = "from=2026-10-31&to=2026-11-02"


def use(operator: Operator, currency: str, requests: int) -> UsingTenant:
    tenant = make_tenant(operator.gateway.database.url)
    key = next(iter(tenant.keys.values()))
    one = Used(tenant.adapters["coral"], key, AT, price_version_id=tenant.version(currency))
    settle(operator.gateway.database.url, tenant, [one] * requests)
    return tenant


async def test_usage_across_tenants(operator: Operator) -> None:
    first, second = use(operator, "USD", 2), use(operator, "USD", 3)
    report = (await operator.get(f"/usage?{RANGE}")).json()
    (row,) = report["data"]
    assert (row["tenant_id"], row["requests"], report["totals"]["requests"]) == (None, 5, 5)
    by_tenant = (await operator.get(f"/usage?{RANGE}&group_by=tenant,adapter&limit=1")).json()
    found = by_tenant["data"]
    more = (await operator.get(f"/usage?cursor={by_tenant['next_cursor']}")).json()["data"]
    rows = {(each["tenant_id"], each["adapter"], each["requests"]) for each in (*found, *more)}
    assert rows == {(str(first.id), "coral", 2), (str(second.id), "coral", 3)}
    one = (await operator.get(f"/usage?{RANGE}&tenant_id={second.id}")).json()
    assert one["totals"]["requests"] == 3
    text = (await operator.get(f"/usage?{RANGE}&group_by=tenant&format=csv")).text
    assert text.splitlines()[0].startswith("tenant_id,start,adapter,key_id,requests")
    assert len(text.splitlines()) == 3


async def test_currencies_of_tenants_are_never_added(operator: Operator) -> None:
    use(operator, "USD", 1), use(operator, "EUR", 2)
    response = await operator.get(f"/usage?{RANGE}")
    assert response.status_code == 400 and response.json()["error"]["param"] == "currency"
    report = (await operator.get(f"/usage?{RANGE}&currency=EUR&group_by=tenant")).json()
    assert (report["currency"], report["totals"]["requests"]) == ("EUR", 2)


async def test_an_unknown_tenant_has_no_usage_and_no_text_is_one(operator: Operator) -> None:
    report = (await operator.get(f"/usage?{RANGE}&tenant_id={uuid4()}")).json()
    assert report["data"] == []
    response = await operator.get(f"/usage?{RANGE}&tenant_id=nonesuch")
    assert response.status_code == 400 and response.json()["error"]["param"] == "tenant_id"
