"""The nine claims of `loraplex tour`. Each tries itself; none has a result of its own making."""

import asyncio
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from uuid import UUID, uuid4

import jsonschema_rs
import msgspec

from loraplex.engine.messages import BASE_MODEL
from loraplex.platform.cli.remote_push import open_remote_push
from loraplex.platform.cli.tour.visitor import Found, Visitor
from loraplex.platform.demo.demo_file import DemoTenantAccess
from loraplex.platform.demo.tenants import ADAPTERS_FOLDER
from loraplex.platform.drills.drill import DrillLoad, run_drill
from loraplex.platform.drills.faults.engine_loss import EngineKill, longest_loss_s
from loraplex.platform.services.push import PushRequest
from loraplex.platform.startup_errors import RequestFailed
from loraplex.tenants.database import Database
from loraplex.tenants.invoices.export import USAGE
from loraplex.tenants.invoices.rows import export_invoice
from loraplex.tenants.invoices.verification import verify_export

DIGEST: Final = "x-loraplex-adapter-digest"
POLL_S: Final = 0.1
CLEANUP_TRIES: Final = 300
USERS: Final = 24
"""So many that a split of 50 to 50 fails to show both versions once in eight million times."""
ROWS: Final = 16
ROW_TOKENS: Final = 24
LOAD: Final = DrillLoad(rate_per_s=4, max_tokens=8)


def _object(**properties: object) -> dict[str, Any]:
    return {
        "type": "object",
        "required": [*properties],
        "additionalProperties": False,
        "properties": properties,
    }


VISIT: Final = _object(
    city={"enum": ["Rome", "Naples"]},
    visitors={"type": "integer", "minimum": 1, "maximum": 9999},
    open={"type": "boolean"},
)
FERRY: Final = _object(to={"enum": ["Capri", "Ischia"]}, day={"enum": ["sunday", "weekday"]})


async def one_step(visit: Visitor) -> Found:
    """Decode with three tenants' adapters and the base model until the engine reports a step with rows of all."""
    owners, names = visit.access.tenants, {BASE_MODEL: visit.access.model}
    for tenant in owners:
        answer = await visit.chat(tenant.adapters[0], tenant.api_key, max_tokens=1)
        names[answer.headers[DIGEST]] = f"{tenant.name}'s {tenant.adapters[0]}"
    models = [*((each.adapters[0], each.api_key) for each in owners), (visit.access.model, owners[0].api_key)]
    chats = [asyncio.create_task(visit.chat(*each, max_tokens=512, ignore_eos=True)) for each in models]
    together: set[str] = set()
    try:
        while together != names.keys() and not any(chat.done() for chat in chats):
            await asyncio.sleep(POLL_S)
            answer = await visit.send("GET", "/operator/v1/engine", visit.access.operator_key)
            steps = [each["queues"]["step_adapters"] for each in answer.json()["engines"] if each["queues"]]
            together = max([together, *(names.keys() & step for step in steps)], key=len)
    finally:
        for chat in chats:
            chat.cancel()
        await asyncio.gather(*chats, return_exceptions=True)
    shown = ", ".join(f"{names[each]} ({each[:8]})" for each in sorted(together))
    return Found(
        together == names.keys(),
        f"{len(chats)} chats at once, of {len(owners)} tenants",
        f"one step had rows of {shown or 'nothing'}",
        f"{visit.curl(answer)}  # queues.step_adapters, while they run",
    )


async def isolation(visit: Visitor) -> Found:
    """Ask for another tenant's adapter, and send one prompt as two tenants."""
    first, other = visit.access.tenants[:2]
    refused = await visit.chat(other.adapters[0], first.api_key, expected=(200, 404))
    code = refused.json().get("error", {}).get("code")
    # No chat: its template begins with words that the tenant's earlier chats have cached.
    prompt = f"{uuid4().hex}. " + "The ferry to Capri leaves from the pier of the old harbor. " * 20
    body = {"model": visit.access.model, "prompt": prompt, "max_tokens": 1}
    answers = [
        await visit.send("POST", "/v1/completions", each.api_key, body) for each in (first, first, other)
    ]
    cached = [each.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
    return Found(
        code == "model_not_found" and refused.status_code == 404 and cached[1] > 0 == cached[0] == cached[2],
        f"{first.name}: {other.name}'s adapter {other.adapters[0]}; a new prompt twice, and once by {other.name}",
        f"HTTP {refused.status_code} {code}; cached tokens {cached[0]}, {cached[1]}, and {cached[2]} of {other.name}",
        visit.curl(refused),
    )


async def schema(visit: Visitor) -> Found:
    """Hold answers to a schema where sampling is hottest."""
    form = {"type": "json_schema", "json_schema": {"name": "visit", "strict": True, "schema": VISIT}}
    ask = partial(visit.chat, visit.access.model, visit.access.tenants[0].api_key, response_format=form)
    answers = await asyncio.gather(*(ask(temperature=2, seed=seed, max_tokens=128) for seed in range(4)))
    texts = [each.json()["choices"][0]["message"]["content"] for each in answers]
    valid = sum(_is_valid(text, VISIT) for text in texts)
    return Found(
        valid == len(texts),
        f"{len(texts)} chats with a JSON schema at temperature 2",
        f"{valid} of {len(texts)} validate, such as {' '.join(texts[0].split())}",
        visit.curl(answers[0]),
    )


async def tool(visit: Visitor) -> Found:
    """Make a model call a tool whose arguments have a schema."""
    function = {"name": "ferry_times", "description": "Departures of a ferry on a day", "parameters": FERRY}
    answer = await visit.chat(
        visit.access.model,
        visit.access.tenants[0].api_key,
        messages=[{"role": "user", "content": "When does the last ferry to Capri leave on Sunday?"}],
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=64,
    )
    choice = answer.json()["choices"][0]
    calls = [
        (each["function"]["name"], each["function"]["arguments"])
        for each in choice["message"].get("tool_calls") or ()
    ]
    return Found(
        choice["finish_reason"] == "tool_calls"
        and [name for name, given in calls if _is_valid(given, FERRY)] == ["ferry_times"],
        "a question, and a tool that must be called",
        f"{choice['finish_reason']}: {', '.join(f'{name}({given})' for name, given in calls)}",
        visit.curl(answer),
    )


async def limit(visit: Visitor) -> Found:
    """Send more requests at once than a new key may send per minute."""
    admin = visit.access.tenants[0].admin_key
    made = (await visit.send("POST", "/tenant/v1/keys", admin, {"name": "tour"}, expected=(201,))).json()
    path = f"/tenant/v1/keys/{made['id']}"
    visit.cleanup.push_async_callback(visit.send, "DELETE", path, admin, expected=(204,))
    etag = (await visit.send("GET", f"{path}/quotas", admin)).headers["etag"]
    await visit.send("PUT", f"{path}/quotas", admin, {"requests_per_minute": 10}, etag=etag)
    chat = partial(visit.chat, visit.access.model, made["api_key"], max_tokens=1, expected=(200, 429))
    answers = await asyncio.gather(*(chat() for _ in range(30)))
    refused = [each.headers["x-request-id"] for each in answers if each.status_code == 429]
    explained = await visit.send("GET", f"/tenant/v1/limits/explain/{[*refused, 'none'][0]}", admin)
    why = [
        f"{each['level']} {each['name']}, {each['used']} of {each['limit']} used"
        for each in explained.json()["decisions"]
        if not each["passed"]
    ]
    return Found(
        len(refused) == 20 and why == ["key requests_per_minute, 10 of 10 used"],
        "30 requests at once with a key of 10 per minute",
        f"{len(answers) - len(refused)} answered, {len(refused)} refused: {'; '.join(why)}",
        visit.curl(explained),
    )


async def alias(visit: Visitor) -> Found:
    """Split an alias between two versions, take that back, and read from headers what served each request."""
    tenant, name = visit.access.tenants[0], f"tour-{uuid4().hex[:8]}"
    admin, path = tenant.admin_key, f"/tenant/v1/adapters/{name}"
    visit.cleanup.push_async_callback(_remove_adapter, visit, path)
    async with open_remote_push(visit.access.base_url, admin, tenant.name) as remote:
        pushes = [
            PushRequest(name=name, folder=ADAPTERS_FOLDER / each, promote="first")
            for each in ("pirate", "support")
        ]
        one, two = [(await remote.push(each)).digest or "" for each in pushes]
    production = f"{path}/aliases/production"
    etag = (await visit.send("GET", production, admin)).headers["etag"]
    split = {"split": [{"version": 1, "weight": 50}, {"version": 2, "weight": 50}]}
    await visit.send("PUT", production, admin, split, etag=etag)
    ask = partial(visit.chat, name, tenant.api_key, max_tokens=1)
    during = await asyncio.gather(*(ask(user=f"user-{number}") for number in range(USERS)))
    await visit.send("POST", f"{production}/rollback", admin)
    after = await asyncio.gather(*(ask(user=f"user-{number}") for number in range(USERS)))
    counts, undone = (Counter(each.headers[DIGEST] for each in answers) for answers in (during, after))
    return Found(
        counts.keys() == {one, two} and undone == {one: USERS},
        f"{name}:production split 50 to 50, {USERS} users; its rollback, and they again",
        f"{one[:8]} {counts[one]} times, {two[:8]} {counts[two]} times; then {one[:8]} {undone[one]} times",
        f"{visit.curl(await visit.chat(tenant.adapters[0], tenant.api_key), '-sSi')} | grep -i {DIGEST}",
    )


async def engine_kill(visit: Visitor) -> Found:
    """Run the drill `engine-kill`."""
    found = visit.installation
    fault = EngineKill(installation=found, seconds=longest_loss_s(found.settings))
    await fault.check()
    report = await run_drill(fault, LOAD, lambda _: None)
    promises = "; ".join(
        f"{each.name}: {each.found}" for each in report.promises if not each.kept or "drift" in each.name
    )
    return Found(
        report.survived,
        f"{report.requests} requests at {LOAD.rate_per_s:g} per second, and SIGKILL to the engine",
        f"{report.completed} answered, {dict(report.errors)}, served again after {report.recovery_s or 0:.1f} s; {promises}",
        f"loraplex drill engine-kill --yes --data-dir {shlex.quote(str(found.data_dir))} --base-url {visit.access.base_url}",
    )


async def invoice(visit: Visitor) -> Found:
    """Export the newest final invoice, recompute it without the server, and change one digit of its rows."""
    listed = await visit.send("GET", "/tenant/v1/billing/invoices", visit.access.tenants[0].admin_key)
    final = [each for each in listed.json()["data"] if each["state"] in ("final", "paid")]
    if not final:
        raise RequestFailed("this tenant has no final invoice")
    newest = max(final, key=lambda each: each["month"])
    database = Database(visit.installation.database_url, pool_size=1)
    visit.cleanup.push_async_callback(database.close)
    folder = Path(visit.cleanup.enter_context(TemporaryDirectory())) / "invoice"
    async with database.as_operator() as session:
        await export_invoice(session, UUID(newest["id"]), folder)
    differs = verify_export(folder)
    rows = (folder / USAGE).read_text().rstrip()
    (folder / USAGE).write_text(f"{rows[:-1]}{(int(rows[-1]) + 1) % 10}\n")
    noticed = verify_export(folder)
    data_dir = shlex.quote(str(visit.installation.data_dir))
    return Found(
        not differs and bool(noticed),
        f"invoice {newest['number']} of {newest['month']} with its {rows.count(chr(10))} rows, then one digit changed",
        f"{differs[0] if differs else 'agrees in every digit'}; changed: {noticed[0] if noticed else 'not noticed'}",
        f"loraplex invoice export {newest['id']} ./invoice --data-dir {data_dir} && loraplex invoice verify ./invoice",
    )


async def mixing(visit: Visitor) -> Found:
    """Measure as many rows of three adapters as of one. No figure is required: it is the machine's."""
    owners = visit.access.tenants
    # Adapters are loaded before the clock runs.
    await _rate(visit, owners, 1)
    mixed, single = await _rate(visit, owners, ROW_TOKENS), await _rate(visit, owners[:1], ROW_TOKENS)
    return Found(
        min(mixed, single) > 0,
        f"{ROWS} chats of {ROW_TOKENS} tokens over {len(owners)} adapters, then {ROWS} of one adapter",
        f"{mixed:.1f} tokens/s over {len(owners)}, {single:.1f} over 1: {mixed / single:.2f} times as many",
        f'loraplex bench serve --base-url {visit.access.base_url} --api-key "$KEY" --target {owners[0].adapters[0]}',
    )


async def _rate(visit: Visitor, owners: Sequence[DemoTenantAccess], tokens: int) -> float:
    """Tokens per second of `ROWS` chats over the tenants' adapters."""
    began, chosen = time.perf_counter(), [owners[row % len(owners)] for row in range(ROWS)]
    chats = [
        visit.chat(each.adapters[0], each.api_key, max_tokens=tokens, ignore_eos=True) for each in chosen
    ]
    answers = await asyncio.gather(*chats)
    generated: int = sum(each.json()["usage"]["completion_tokens"] for each in answers)
    return generated / (time.perf_counter() - began)


async def _remove_adapter(visit: Visitor, path: str) -> None:
    """Delete the adapter once its last request has been settled. Raises `RequestFailed`."""
    admin = visit.access.tenants[0].admin_key
    await visit.send("DELETE", f"{path}/aliases/production", admin, expected=(204, 404))
    for _ in range(CLEANUP_TRIES):
        answer = await visit.send("DELETE", path, admin, expected=(204, 404, 409, 503))
        if answer.status_code in (204, 404):
            return
        await asyncio.sleep(POLL_S)
    raise RequestFailed(f"{path} is left: {answer.text[:200]}")


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        return jsonschema_rs.validator_for(schema).is_valid(msgspec.json.decode(text))
    except msgspec.DecodeError:
        return False
