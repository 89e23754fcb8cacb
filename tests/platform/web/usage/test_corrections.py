"""Corrections of usage over HTTP."""

from uuid import UUID, uuid4

from tests.platform.web.operator_client import Operator
from tests.tenants.ledger.settled_rows import read, reservation, usage

from loraplex.tenants.ledger.usage_ledger import UsageLedger


async def test_an_operator_takes_usage_back_once(operator: Operator) -> None:
    path, key = await operator.tenant()
    tenant_id, ledger = UUID(path.rpartition("/")[2]), UsageLedger(operator.gateway.database)
    wrong = reservation(tenant_id)
    await ledger.settle(wrong, usage(amount=9_007_199_254_740_993))
    await ledger.close()
    body = {"request_id": str(wrong.id), "reason": "the engine was broken"}
    first = await operator.post("/usage/corrections", body, **{"idempotency-key": "once"})
    again = await operator.post("/usage/corrections", body, **{"idempotency-key": "once"})
    assert first.status_code == again.status_code == 201 and first.json() == again.json()
    correction = first.json()
    assert correction | {"id": None} == {
        "id": None,
        "request_id": str(wrong.id),
        "tenant_id": str(tenant_id),
        "reason": "the engine was broken",
        "prompt_tokens": -10,
        "cached_tokens": -4,
        "completion_tokens": -5,
        "reasoning_tokens": 0,
        "amount_pico": "-9007199254740993",
        "currency": wrong.price.currency,
    }
    assert operator.gateway.admissions.recounted == [tenant_id]
    refused = await operator.post("/usage/corrections", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    unknown = await operator.post("/usage/corrections", body | {"request_id": str(uuid4())})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    for reason in ("", " "):
        refused = await operator.post("/usage/corrections", body | {"reason": reason})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reason")
    entries = await read(
        operator.gateway.database,
        "SELECT target, after ->> 'amount_pico', tenant_id FROM audit_entries WHERE action = 'usage.correct'",
    )
    assert entries == [(f"requests/{wrong.id}", "-9007199254740993", tenant_id)]
    assert (await operator.as_tenant("POST", "/usage/corrections", key)).status_code == 403
