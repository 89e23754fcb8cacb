"""`/operator/v1/tenants/{id}/quotas` over HTTP: changed by name, without lost updates, within bounds."""

from typing import Any

from loraplex.tenants.models import LIMIT_COLUMNS

REFUSED: tuple[tuple[str, Any], ...] = (
    ("tokens_per_day", -1),
    ("tokens_per_day", 2**53),
    ("tokens_per_day", 1.5),
    ("tokens_per_day", "5"),
    ("requests_per_minute", 100_000_001),
    ("budget_per_day", 9_000_000_000_001),
    ("budget_per_year", 1),
    ("default_max_tokens", 1_000_001),
)


async def test_limits_are_changed_by_name(operator: Any) -> None:
    path, _ = await operator.tenant()
    fresh = await operator.get(f"{path}/quotas")
    assert fresh.json() == dict.fromkeys(LIMIT_COLUMNS) and fresh.headers["etag"] == '"1"'
    body = {"tokens_per_day": 500, "budget_per_month": 9_000_000_000_000, "default_max_tokens": 0}
    changed = await operator.patch(f"{path}/quotas", body, fresh.headers["etag"])
    assert changed.json() == {**dict.fromkeys(LIMIT_COLUMNS), **body}
    late = await operator.patch(f"{path}/quotas", {"max_keys": 1}, fresh.headers["etag"])
    assert (late.status_code, late.json()["error"]["code"]) == (412, "precondition_failed")
    removed = await operator.patch(f"{path}/quotas", {"tokens_per_day": None}, changed.headers["etag"])
    assert removed.json()["tokens_per_day"] is None
    shown = await operator.get(f"{path}/quotas")
    assert (shown.content, shown.headers["etag"]) == (removed.content, removed.headers["etag"])
    entries = (await operator.get("/audit?action=quotas.change")).json()["data"]
    assert [entry["after"] for entry in entries] == [{"tokens_per_day": None}, body]
    assert f"/{entries[0]['target']}" == f"{path}/quotas"


async def test_invalid_limits_are_refused_by_name(operator: Any) -> None:
    path, _ = await operator.tenant()
    for name, value in REFUSED:
        response = await operator.patch(f"{path}/quotas", {name: value}, '"1"')
        assert (response.status_code, response.json()["error"]["param"]) == (400, name), value
