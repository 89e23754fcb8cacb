"""Aliases over HTTP: create, move with the current ETag, split, roll back, delete; and the list of `/v1/models`."""

import asyncio

from tests.platform.web.managed_tenant import ManagedTenant

ALIAS = "adapters/pirate/aliases/production"


async def test_the_lifecycle_of_an_alias(tenant: ManagedTenant) -> None:
    for number in (1, 2, 3):
        await tenant.version(number)
    assert (await tenant.http.put(ALIAS, json={"version": 1})).status_code == 428
    made = await tenant.put("production", {"version": 1}, None)
    assert (made.status_code, made.headers["etag"], made.json()["version"]) == (201, '"1"', 1)
    assert (await tenant.put("production", {"version": 2}, None)).status_code == 412
    same = await tenant.put("production", {"version": 1}, 1)
    assert (same.status_code, same.headers["etag"]) == (200, '"1"')
    split = {"split": [{"version": 2, "weight": 90}, {"version": 3, "weight": 10}]}
    moved = (await tenant.put("production", split, 1)).json()
    assert (moved["version"], moved["split"], moved["revision"]) == (None, split["split"], 2)
    assert moved["previous"] == [{"version": 1, "weight": 100}]
    assert (await tenant.put("production", {"version": 3}, 1)).status_code == 412
    stale = await tenant.http.post(f"{ALIAS}/rollback", headers={"if-match": '"1"'})
    assert stale.status_code == 412
    back = await tenant.http.post(f"{ALIAS}/rollback", headers={"if-match": '"2"'})
    assert (back.json()["version"], back.headers["etag"]) == (1, '"3"')
    assert (await tenant.http.get(ALIAS)).json() == back.json()
    assert (await tenant.http.get("adapters/pirate/aliases")).json()["data"] == [back.json()]
    assert (await tenant.http.delete(ALIAS, headers={"if-match": '"2"'})).status_code == 412
    assert (await tenant.http.delete(ALIAS)).status_code == 204
    assert (await tenant.http.get(ALIAS)).status_code == 404
    actions = ("create", "move", "rollback", "delete")
    assert await tenant.actions() == [
        (f"alias.{each}", "adapters/pirate/aliases/production") for each in actions
    ]
    move = (await tenant.http.get("audit?action=alias.move")).json()["data"][0]
    assert (move["before"], move["after"]) == ({"targets": {"1": 100}}, {"targets": {"2": 90, "3": 10}})


SPLIT: dict[str, object] = {"split": [{"version": 1, "weight": 90}, {"version": 3, "weight": 10}]}
REFUSED: list[tuple[str, object, int, str | None]] = [
    ("production", {}, 400, "version"),
    ("production", {"version": 1, "split": [{"version": 1, "weight": 100}]}, 400, "version"),
    ("production", {"version": 0}, 400, "version"),
    ("production", {"version": 2**40}, 400, "version"),
    ("production", {"split": []}, 400, "split"),
    ("production", {"split": [{"version": 1, "weight": 50}, {"version": 1, "weight": 50}]}, 400, "split"),
    ("production", {"split": [{"version": 1, "weight": 99}]}, 400, "split"),
    ("production", {"split": [{"version": 1, "weight": 101}]}, 400, "split.0.weight"),
    ("production", {"version": 1, "guard": {"max_unsatisfied": 0.1}}, 400, "guard"),
    ("production", SPLIT | {"guard": {}}, 400, "guard"),
    ("production", SPLIT | {"guard": {"min_requests": 100}}, 400, "guard"),
    ("production", SPLIT | {"guard": {"max_unsatisfied": 0.1}}, 400, "guard.baseline"),
    ("production", SPLIT | {"guard": {"max_unsatisfied": 0.1, "baseline": 9}}, 400, "guard.baseline"),
    ("production", SPLIT | {"guard": {"max_failure_ratio": 0.5}}, 400, "guard.max_failure_ratio"),
    ("production", SPLIT | {"guard": {"max_ttft_ratio": "2"}}, 400, "guard.max_ttft_ratio"),
    ("production", SPLIT | {"guard": {"max_unsatisfied": 1}}, 400, "guard.max_unsatisfied"),
    (
        "production",
        SPLIT | {"guard": {"max_unsatisfied": 0.1, "min_requests": 19}},
        400,
        "guard.min_requests",
    ),
    ("production", SPLIT | {"guard": {"max_unsatisfied": 0.1, "alpha": 0.5}}, 400, "guard.alpha"),
    ("Production", {"version": 1}, 400, "alias"),
    ("a%00", {"version": 1}, 400, "alias"),
    ("production", {"version": 9}, 404, None),
    ("production", {"version": 2}, 409, None),
]


async def test_invalid_targets_are_refused(tenant: ManagedTenant) -> None:
    await tenant.version(1)
    await tenant.version(2, state="quarantined")
    await tenant.version(3)
    for alias, body, status, param in REFUSED:
        response = await tenant.put(alias, body, None)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param), (alias, body)


async def test_a_guard_of_a_split(tenant: ManagedTenant) -> None:
    for number in (1, 2, 3):
        await tenant.version(number)
    await tenant.put("production", {"version": 1}, None)
    guarded = SPLIT | {"guard": {"max_failure_ratio": 2, "max_unsatisfied": 0.05}}
    put = await tenant.put("production", guarded, 1)
    guard = put.json()["guard"]
    assert (put.status_code, guard["baseline"], guard["canary"], guard["min_requests"]) == (200, 1, 3, 100)
    assert (guard["max_failure_ratio"], guard["max_unsatisfied"], guard["max_ttft_ratio"]) == (
        2.0,
        0.05,
        None,
    )
    assert guard["counts"]["canary_requests"] == 0
    assert guard["evidence"] == {"max_failure_ratio": 0.0, "max_unsatisfied": 0.0}
    assert (await tenant.http.get(ALIAS)).json() == put.json()
    same = await tenant.put("production", guarded, 2)
    assert same.headers["etag"] == '"2"'
    wider = {"split": [{"version": 1, "weight": 50}, {"version": 3, "weight": 50}]}
    moved = (await tenant.put("production", wider | {"guard": {"max_ttft_ratio": 3}}, 2)).json()
    assert moved["guard"]["baseline"] == 1, "that of the guard before"
    assert (await tenant.put("production", wider, 3)).json()["guard"] is None
    entries = (await tenant.http.get("audit?action=alias.move")).json()["data"]
    assert [entry["after"].get("guard") for entry in entries] == [
        None,
        {"baseline": 1, "max_ttft_ratio": 3.0, "min_requests": 100},
        {"baseline": 1, "max_failure_ratio": 2.0, "max_unsatisfied": 0.05, "min_requests": 100},
    ]


async def test_one_of_several_concurrent_moves_wins(tenant: ManagedTenant) -> None:
    for number in range(1, 7):
        await tenant.version(number)
    await tenant.put("production", {"version": 1}, None)
    responses = await asyncio.gather(
        *(tenant.put("production", {"version": number}, 1) for number in range(2, 7))
    )
    assert sorted(response.status_code for response in responses) == [200, *[412] * 4]
    new = await asyncio.gather(*(tenant.put("canary", {"version": number}, None) for number in (1, 2, 3)))
    assert sorted(response.status_code for response in new) == [201, 412, 412]


async def test_a_rollback_is_repeatable(tenant: ManagedTenant) -> None:
    for number in (1, 2):
        await tenant.version(number)
    await tenant.put("production", {"version": 1}, None)
    await tenant.put("production", {"version": 2}, 1)
    responses = [
        await tenant.http.post(f"{ALIAS}/rollback", headers={"idempotency-key": "k"}) for _ in range(2)
    ]
    assert [response.json()["version"] for response in responses] == [1, 1]
    assert (await tenant.http.get(ALIAS)).json()["revision"] == 3


async def test_the_model_list_has_the_served_models(tenant: ManagedTenant) -> None:
    for number in (1, 2):
        await tenant.version(number)
        await tenant.version(number, "sailor")
    await tenant.put("canary", {"version": 2}, None)
    await tenant.put(
        "production", {"split": [{"version": 1, "weight": 1}, {"version": 2, "weight": 99}]}, None
    )
    await tenant.put("beta", {"version": 1}, None, "sailor")
    listed = (await tenant.http.get(f"{tenant.gateway.url}/v1/models")).json()["data"]
    assert [(model["id"], model["root"]) for model in listed[1:]] == [
        ("pirate:canary", "pirate@2"),
        ("pirate", "pirate@2"),
        ("sailor:beta", "sailor@1"),
    ]
    assert {model["system_fingerprint"] for model in listed} == {"fp_fa4efa4efa4efa4e"}
    for model in listed:
        found = await tenant.http.get(f"{tenant.gateway.url}/v1/models/{model['id']}")
        assert found.status_code == 200 and found.json()["id"] == model["id"]
