"""Suites, evaluations and gates over HTTP: what a tenant's admin does from an upload to a release, and what is refused."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from msgspec.structs import replace
from sqlalchemy import text
from tests.platform.web.gateway import StartGateway
from tests.platform.web.managed_tenant import ManagedTenant, managed
from tests.tenants.registry_records import digest
from typer.testing import CliRunner, Result

from loraplex.engine.fake_engine import FakeEngine, FakeScript
from loraplex.engine.messages import EngineRequest, Event
from loraplex.platform.cli.main import main
from loraplex.platform.evaluations.conformance import conformance_suite
from loraplex.platform.web.evaluations.execution import pause_s
from loraplex.tenants.api_keys.keys import KeyRepository

USER = [{"role": "user", "content": "Where does the ferry leave?"}]
SUITE = b"\n".join(
    json.dumps({"messages": USER, "expect": {"regex": "Pier"}, "id": f"case-{n}"}).encode() for n in range(4)
)
EVALUATIONS = "adapters/pirate/versions/{}/evaluations"
GATE = "adapters/pirate/aliases/production/gate"


class AnsweringEngine(FakeEngine):
    """The base model and version 1 know the pier, any other version does not."""

    async def submit(self, request: EngineRequest) -> AsyncIterator[Event]:
        is_first = request.adapter is None or request.adapter.digest == digest(1)
        self.script = replace(self.script, answers=(("Pier ", "7"),) if is_first else (("I am ", "a ship"),))
        async for event in super().submit(request):
            yield event


@asynccontextmanager
async def executing(gateway: Any) -> AsyncIterator[None]:
    """Run the evaluations of a gateway."""
    running = asyncio.create_task(gateway.app.state.evaluations.run())
    try:
        yield
    finally:
        running.cancel()


@pytest.fixture
async def admin(start_gateway: StartGateway) -> AsyncIterator[ManagedTenant]:
    """A tenant with `pirate`, whose version 1 is production; 2 is new."""
    gateway = await start_gateway(real_engine=AnsweringEngine(FakeScript()))
    async with managed(gateway, "writer") as tenant:
        await tenant.version(1)
        await tenant.version(2)
        assert (await tenant.put("production", {"version": 1}, None)).status_code == 201
        yield tenant


async def upload(
    tenant: ManagedTenant, content: bytes = SUITE, name: str = "harbor", **query: str
) -> httpx.Response:
    return await tenant.http.post("suites", content=content, params={"name": name, **query})


async def ended(tenant: ManagedTenant, started: httpx.Response) -> dict[str, Any]:
    assert started.status_code == 202, started.text
    path = f"evaluations/{started.json()['id']}"
    async with asyncio.timeout(30):
        while True:
            found: dict[str, Any] = (await tenant.http.get(path)).json()
            if found["state"] not in ("queued", "running"):
                return found
            await asyncio.sleep(0.05)


async def evaluate(tenant: ManagedTenant, version: int, **body: object) -> dict[str, Any]:
    asked = {"suite": "harbor", "baseline": "production", **body}
    return await ended(tenant, await tenant.http.post(EVALUATIONS.format(version), json=asked))


async def test_a_suite_never_changes(admin: ManagedTenant) -> None:
    made = await upload(admin)
    assert made.status_code == 201, made.text
    sha256 = hashlib.sha256(SUITE).hexdigest()
    assert (made.json()["sha256"], made.json()["cases"]) == (sha256, 4)
    assert (await upload(admin)).json() == made.json()
    changed = await upload(admin, SUITE + b"\n" + SUITE.replace(b"case", b"more"))
    assert (changed.status_code, changed.json()["error"]["code"]) == (409, "conflict")
    assert (await admin.http.get("suites/harbor/content")).content == SUITE
    assert (await admin.http.get("suites/conformance/content")).content == conformance_suite()
    stored = {row[0] for row in await _rows(admin, "SELECT content FROM suites")}
    assert not any(b"ferry" in content for content in stored)
    assert (await admin.http.delete("suites/harbor")).status_code == 204
    assert (await admin.http.get("suites/harbor")).status_code == 404


async def _rows(tenant: ManagedTenant, query: str) -> list[Any]:
    async with tenant.database.as_operator() as session:
        return [*(await session.execute(text(query))).all()]


async def test_a_wrong_suite_is_refused_with_its_place(admin: ManagedTenant) -> None:
    for content, query, param, said in (
        (SUITE + b'\n{"messages": 1}', {}, "5.messages", "Line 5"),
        (SUITE.replace(b"Pier", b"("), {}, "1.expect.regex", "Line 1"),
        (b"", {}, "suite", "1 to 10000 cases"),
        (SUITE, {"name": "conformance"}, "name", "built-in"),
        (SUITE, {"name": "Big Name"}, "suite", "a-z"),
        (SUITE, {"nam": "x"}, "nam", "allowed: name, base"),
    ):
        refused = await admin.http.post("suites", content=content, params={"name": "harbor", **query})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, param)
        assert said in error["message"]


async def test_suites_are_the_tenants_own_or_the_installations(admin: ManagedTenant) -> None:
    key = await admin.gateway.tenant("other", ("tenant:admin",))
    async with admin.database.as_operator() as session:
        operator = (await KeyRepository(session).create(None, "operator", ["operator"])).plaintext
    assert (await upload(admin, name="own")).status_code == 201
    async with client(admin, "operator", operator) as operators, client(admin, "tenant", key) as other:
        shared = await operators.post("suites", content=SUITE, params={"name": "safety"})
        assert (shared.status_code, shared.json()["shared"]) == (201, True)
        assert [each["name"] for each in (await operators.get("suites")).json()["data"]] == ["safety"]
        assert [each["name"] for each in (await other.get("suites")).json()["data"]] == ["safety"]
        for path in ("suites/own", "suites/own/content"):
            assert (await other.get(path)).status_code == 404
        assert (await other.delete("suites/own")).status_code == 404
        assert (await other.delete("suites/safety")).status_code == 404
        assert (await other.get("suites/safety/content")).content == SUITE
        async with executing(admin.gateway):
            assert (await evaluate(admin, 2, suite="safety"))["state"] == "completed"
        assert (await operators.delete("suites/safety")).status_code == 204


def client(tenant: ManagedTenant, plane: str, key: str) -> httpx.AsyncClient:
    url = f"{tenant.gateway.url}/{plane}/v1/"
    return httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"})


async def test_a_gate_stops_a_worse_version_until_an_admin_gives_a_reason(admin: ManagedTenant) -> None:
    await upload(admin)
    gate = {"suite": "harbor", "min_pass": 0.5, "max_regression": 0.1}
    assert (await admin.http.put(GATE, json=gate)).status_code == 200
    unseen = await admin.put("production", {"version": 2}, 1)
    assert (unseen.status_code, unseen.json()["error"]["code"]) == (409, "gate_failed")
    assert "no evaluation" in unseen.json()["error"]["message"]
    async with executing(admin.gateway):
        worse = await evaluate(admin, 2)
    assert (worse["state"], worse["pass_rate"], worse["baseline_pass_rate"]) == ("completed", 0.0, 1.0)
    assert (worse["baseline"], worse["total"], worse["done"]) == ("pirate@1", 8, 8)
    stopped = await admin.put(
        "production", {"split": [{"version": 1, "weight": 95}, {"version": 2, "weight": 5}]}, 1
    )
    assert stopped.status_code == 409
    assert stopped.json()["error"]["param"] == f"evaluations/{worse['id']}"
    assert (await admin.put("production", {"version": 2, "override": {"reason": ""}}, 1)).status_code == 400
    writer = await _key(admin, ["adapters:write"])
    headers = {"authorization": f"Bearer {writer}"}
    past = {"version": 2, "override": {"reason": "the harbor moved"}}
    admin.http.headers, own = httpx.Headers(headers), admin.http.headers
    assert (await admin.put("production", past, 1)).status_code == 403
    assert (await admin.http.put(GATE, json=gate | {"min_pass": 0})).status_code == 403
    assert (await admin.http.delete(GATE)).status_code == 403
    admin.http.headers = own
    assert (await admin.put("production", past, 1)).json()["version"] == 2
    [entry] = (await admin.http.get("audit?action=alias.gate.override")).json()["data"]
    assert (entry["after"]["reason"], entry["after"]["evaluation"]) == ("the harbor moved", worse["id"])
    back = await admin.http.post("adapters/pirate/aliases/production/rollback")
    assert back.json()["version"] == 1
    forward = await admin.http.post("adapters/pirate/aliases/production/rollback")
    assert forward.json()["error"]["code"] == "gate_failed"
    removed = await admin.http.delete("adapters/pirate/aliases/production")
    assert removed.json()["error"]["code"] == "in_use"
    assert (await admin.http.delete("suites/harbor")).json()["error"]["code"] == "in_use"
    assert (await admin.http.delete(GATE)).status_code == 204
    assert (await admin.put("production", {"version": 2}, 3)).status_code == 200


async def _key(tenant: ManagedTenant, scopes: list[str]) -> str:
    made = await tenant.http.post("keys", json={"name": "writer", "scopes": scopes})
    return str(made.json()["api_key"])


async def test_a_gate_knows_the_profile_that_was_evaluated(admin: ManagedTenant) -> None:
    await upload(admin)
    gate = {"suite": "harbor", "min_pass": 0.0}
    assert (await admin.http.put(GATE, json=gate)).status_code == 200
    async with executing(admin.gateway):
        assert (await evaluate(admin, 2))["state"] == "completed"
    version = await admin.http.get("adapters/pirate/versions/2")
    changed = await admin.http.patch(
        "adapters/pirate/versions/2",
        json={"defaults": {"temperature": 1.5}},
        headers={"if-match": version.headers["etag"]},
    )
    assert changed.status_code == 200
    refused = await admin.put("production", {"version": 2}, 1)
    assert "with its profile" in refused.json()["error"]["message"]
    async with executing(admin.gateway):
        await evaluate(admin, 2)
    assert (await admin.put("production", {"version": 2}, 1)).status_code == 200


async def test_a_release_goes_on_to_all_requests_by_the_report_it_began_with(admin: ManagedTenant) -> None:
    await upload(admin)
    gate = {"suite": "harbor", "min_pass": 0.0, "max_regression": 1.0}
    assert (await admin.http.put(GATE, json=gate)).status_code == 200
    async with executing(admin.gateway):
        assert (await evaluate(admin, 2))["baseline"] == "pirate@1"
    for generation, share in enumerate((5, 50, 95, 100), 1):
        shares = {1: 100 - share, 2: share}
        split = [{"version": version, "weight": weight} for version, weight in shares.items() if weight]
        moved = await admin.put("production", {"split": split}, generation)
        assert moved.status_code == 200, moved.text


async def test_two_runs_give_the_same_bytes_and_are_charged(admin: ManagedTenant) -> None:
    await upload(admin)
    reports = []
    async with executing(admin.gateway):
        for _ in range(2):
            found = await evaluate(admin, 2, seed=7)
            report = await admin.http.get(f"evaluations/{found['id']}/report")
            assert hashlib.sha256(report.content).hexdigest() == found["report_sha256"]
            reports.append(report.content)
    assert reports[0] == reports[1]
    document = json.loads(reports[0])
    assert document["comparison"] == {"worse": 4, "better": 0, "p_value": 0.125}
    assert [case["case"] for case in document["cases"]] == [f"case-{n}" for n in range(4)]
    assert document["cases"][0]["answer"]["text"] == "I am a ship"
    assert document["model"]["model"] == "pirate@2"
    salts = {request.cache_salt for request in admin.gateway.app.state.inference.dependencies.engine.requests}
    assert len(salts) == 2
    assert await _rows(admin, "SELECT 1 FROM evaluation_answers") == []


async def test_what_an_evaluation_is_refused_for(admin: ManagedTenant) -> None:
    await upload(admin)
    await upload(admin, name="elsewhere", base="f" * 64)
    path = EVALUATIONS.format(2)
    for body, status, param in (
        ({"suite": "harbor", "baseline": 2}, 400, "baseline"),
        ({"suite": "harbor", "baseline": "staging"}, 400, "baseline"),
        ({"suite": "harbor", "baseline": 9}, 404, None),
        ({"suite": "elsewhere"}, 400, "suite"),
        ({"suite": "none"}, 404, None),
        ({"suite": "harbor", "seed": -1}, 400, "seed"),
    ):
        refused = await admin.http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), body
    assert (await admin.http.post(EVALUATIONS.format(9), json={"suite": "harbor"})).status_code == 404
    assert (await admin.http.get(f"evaluations/{uuid4()}")).status_code == 404
    without = {"authorization": f"Bearer {await _key(admin, ['adapters:write'])}"}
    refused = await admin.http.post(path, json={"suite": "harbor"}, headers=without)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
    for _ in range(10):
        assert (await admin.http.post(path, json={"suite": "harbor"})).status_code == 202
    assert (await admin.http.post(path, json={"suite": "harbor"})).json()["error"]["code"] == "limit_reached"
    [first, *_] = (await admin.http.get(path)).json()["data"]
    cancelled = await admin.http.post(f"evaluations/{first['id']}/cancel")
    assert cancelled.json()["state"] == "cancelled"
    assert (await admin.http.post(f"evaluations/{first['id']}/cancel")).status_code == 409
    assert (await admin.http.get(f"evaluations/{first['id']}/report")).status_code == 404


async def test_another_gateway_goes_on_where_one_ended(admin: ManagedTenant) -> None:
    await upload(admin)
    started = await admin.http.post(EVALUATIONS.format(2), json={"suite": "harbor", "baseline": "base"})
    engine = admin.gateway.app.state.inference.dependencies.engine
    engine.script = replace(engine.script, token_interval_s=0.2)
    async with executing(admin.gateway):
        async with asyncio.timeout(20):
            while not await _rows(admin, "SELECT 1 FROM evaluation_answers"):
                await asyncio.sleep(0.02)
    for task in [*admin.gateway.app.state.evaluations._running]:
        task.cancel()
    before = len(engine.requests)
    await _execute(admin, "UPDATE evaluations SET claimed_until = now() - interval '1 second'")
    engine.script = replace(engine.script, token_interval_s=0.0)
    async with executing(admin.gateway):
        found = await ended(admin, started)
    assert (found["state"], found["done"], found["baseline"]) == ("completed", 8, "demo/base")
    assert found["baseline_pass_rate"] == 1.0
    assert len(engine.requests) < before + 8


async def _execute(tenant: ManagedTenant, statement: str) -> None:
    async with tenant.database.as_operator() as session:
        await session.execute(text(statement))


async def test_a_revoked_key_ends_its_evaluation(admin: ManagedTenant) -> None:
    await upload(admin)
    made = (
        await admin.http.post("keys", json={"name": "ci", "scopes": ["adapters:write", "inference"]})
    ).json()
    started = await admin.http.post(
        EVALUATIONS.format(2),
        json={"suite": "harbor"},
        headers={"authorization": f"Bearer {made['api_key']}"},
    )
    await admin.http.delete(f"keys/{made['id']}")
    async with executing(admin.gateway):
        found = await ended(admin, started)
    assert found["state"] == "failed"
    assert "cannot go on" in found["reason"]


def test_an_evaluation_leaves_half_of_each_rate_to_other_requests() -> None:
    limit = {"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "40"}
    assert pause_s({}) == 0.0
    assert pause_s(limit) == 0.0
    assert pause_s(limit | {"x-ratelimit-remaining-requests": "25"}) == 5.0
    tokens = {"x-ratelimit-limit-tokens": "6000", "x-ratelimit-remaining-tokens": "0"}
    assert pause_s(limit | tokens) == 30.0


async def test_the_command_says_by_its_exit_code_whether_a_version_passes(
    admin: ManagedTenant, tmp_path: Path
) -> None:
    file = tmp_path / "harbor.jsonl"
    file.write_bytes(SUITE)

    async def run(*options: str, suite: str = str(file)) -> Result:
        common = ("--suite", suite, "--key", "-", "--url", admin.gateway.url)
        arguments = ["eval", "run", *common, *options]
        return await asyncio.to_thread(CliRunner().invoke, main, arguments, input=admin.key)

    compared = ("--adapter", "pirate@2", "--baseline", "pirate:production")
    assert (await run(*compared)).exit_code == 0
    worse = await run(*compared, "--max-regression", "0.1", "--json", "--out", str(tmp_path / "report.json"))
    assert worse.exit_code == 1
    assert "1 below the baseline; allowed is 0.1" in worse.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report == json.loads(worse.stdout)
    assert report["baseline"]["model"] == "pirate@1"
    assert (await run("--model", "demo/base", "--min-pass", "1")).exit_code == 0
    itself = await run("--adapter", "pirate@1", "--baseline", "pirate:production")
    assert (itself.exit_code, "itself" in itself.stderr) == (1, True)
    for suite, said in ((str(tmp_path / "none"), "No such file"), (__file__, "Line 1")):
        refused = await run("--model", "demo/base", suite=suite)
        assert (refused.exit_code, said in refused.stderr) == (1, True), refused.stderr
