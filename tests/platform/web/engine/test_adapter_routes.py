"""`GET /operator/v1/engine/adapters`: ranks of adapters over all tenants, of the asked time alone."""

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from tests.platform.web.operator_client import Operator
from tests.tenants.ledger.stored_usage import Used, UsingTenant, make_tenant, settle

PATH = "/engine/adapters"


def used(tenant: UsingTenant, adapter: str | None, times: list[int | None], **fields: Any) -> list[Used]:
    at = datetime.now(UTC) - timedelta(minutes=fields.pop("ago", 1))
    key = next(iter(tenant.keys.values()))
    adapter_id = None if adapter is None else tenant.adapters[adapter]
    return [Used(adapter_id, key, at, ttft_ms=ttft, **fields) for ttft in times]


@pytest.fixture
def busy(operator: Operator) -> tuple[UsingTenant, UsingTenant]:
    """Two tenants, of which the first has the most requests and the second the slowest, the most errors and the most tokens."""
    url = operator.gateway.database.url
    many, slow = make_tenant(url, "many"), make_tenant(url, "slow")
    settle(
        url,
        many,
        [
            *used(many, "coral", [100, 200, 300, 400]),
            *used(many, None, [10, None]),
            *used(many, "support", [9000], ago=30),
        ],
    )
    settle(
        url,
        slow,
        [
            *used(slow, "coral", [5000], completion=900),
            *used(slow, "support", [None, None], outcome="failed", completion=0),
        ],
    )
    return many, slow


async def ranked(operator: Operator, query: str = "") -> list[dict[str, Any]]:
    response = await operator.get(f"{PATH}{query}")
    assert response.status_code == 200 and response.json()["next_cursor"] is None
    found: list[dict[str, Any]] = response.json()["data"]
    return found


async def test_an_empty_installation_has_none(operator: Operator) -> None:
    for order in ("ttft", "errors", "requests", "tokens"):
        assert await ranked(operator, f"?sort={order}&minutes=1440") == []


async def test_adapters_are_ranked_by_what_is_asked(
    operator: Operator, busy: tuple[UsingTenant, UsingTenant]
) -> None:
    many, slow = busy
    first = (await ranked(operator))[0]
    assert first == {
        "tenant_id": str(slow.id),
        "tenant": "slow",
        "adapter_id": str(slow.adapters["coral"]),
        "adapter": "coral",
        "requests": 1,
        "errors": 0,
        "tokens": 914,
        "ttft_p50_ms": 5000,
        "ttft_p95_ms": 5000,
    }
    firsts = {
        order: (await ranked(operator, f"?sort={order}&limit=1"))[0]
        for order in ("errors", "requests", "tokens")
    }
    assert {order: (row["tenant"], row["adapter"]) for order, row in firsts.items()} == {
        "errors": ("slow", "support"),
        "requests": ("many", "coral"),
        "tokens": ("slow", "coral"),
    }
    assert (firsts["errors"]["errors"], firsts["errors"]["ttft_p95_ms"]) == (2, None)
    assert (firsts["requests"]["ttft_p50_ms"], firsts["requests"]["ttft_p95_ms"]) == (200, 400)
    base = next(row for row in await ranked(operator) if row["adapter_id"] is None)
    assert (base["tenant_id"], base["adapter"], base["requests"]) == (str(many.id), None, 2)


async def test_only_the_asked_time_counts(operator: Operator, busy: tuple[UsingTenant, UsingTenant]) -> None:
    assert len(await ranked(operator)) == 4 and len(await ranked(operator, "?minutes=60")) == 5
    assert (await ranked(operator, "?minutes=60"))[0]["ttft_p95_ms"] == 9000


async def test_an_erased_adapter_keeps_its_requests(
    operator: Operator, busy: tuple[UsingTenant, UsingTenant]
) -> None:
    _, slow = busy
    with psycopg.connect(operator.gateway.database.url) as connection:
        connection.execute("DELETE FROM adapters WHERE id = %s", [slow.adapters["coral"]])
    first = (await ranked(operator))[0]
    assert (first["adapter"], first["adapter_id"]) == (None, str(slow.adapters["coral"]))


@pytest.mark.parametrize(
    ("query", "param"),
    [("sort=name", "sort"), ("minutes=0", "minutes"), ("minutes=1441", "minutes"), ("minutes=x", "minutes")],
)
async def test_other_values_are_refused(operator: Operator, query: str, param: str) -> None:
    response = await operator.get(f"{PATH}?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
