"""`loraplex tour`: tries nine claims on a running demo and prints each with what was sent, what came back and how to repeat it.

The docstring of each function in `CLAIMS` is what it tries. Exit codes: 0 every claim held, 1 otherwise.
Invariant: a claim holds or not by what came back; what it made is removed, also where it fails or is stopped.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final, Literal, TypeAlias
from uuid import UUID, uuid4

import httpx
import msgspec
import typer
from rich.console import Console

from loraplex.adapters.errors import AdaptersError
from loraplex.adapters.push import PushRequest
from loraplex.engine.messages import BASE_MODEL
from loraplex.platform.cli.command_context import end_at_sigterm, exit_codes
from loraplex.platform.cli.remote_push import open_remote_push
from loraplex.platform.config import load_settings
from loraplex.platform.demo.announcement import QUESTION
from loraplex.platform.demo.demo_file import DEMO_FILE, DemoAccess, DemoTenantAccess, read_demo_file
from loraplex.platform.demo.tenants import ADAPTERS_FOLDER
from loraplex.platform.drills.drill import run_drill
from loraplex.platform.drills.faults.engine_loss import EngineKill
from loraplex.platform.drills.installation import Installation, find_installation
from loraplex.platform.drills.traffic import DrillLoad
from loraplex.platform.inference.rate_limit_headers import MODE_HEADER
from loraplex.platform.processes.progress import SILENT
from loraplex.platform.startup_errors import RequestFailed, StartError
from loraplex.tenants.database import Database
from loraplex.tenants.errors import TenantsError
from loraplex.tenants.invoices.export import USAGE
from loraplex.tenants.invoices.rows import export_invoice
from loraplex.tenants.invoices.verification import verify_export

DIGEST: Final = "x-loraplex-adapter-digest"
FAILURES: Final = (httpx.HTTPError, OSError, LookupError, ValueError, TenantsError, AdaptersError, StartError)
"""What a claim raises where something does not answer, or answers what the API does not promise."""
READ_KEYS: Final = (
    'import json, sys; d = json.load(open(sys.argv[1])); t = d["tenants"][0]; '
    'print(t["api_key"], t["admin_key"], d["operator_key"])'
)
POLL_S: Final = 0.1
POLLS: Final = 300
TIMEOUT_S: Final = 120.0
KEY_LIFE: Final = timedelta(minutes=10)
"""A key that the tour could not revoke ends by itself."""
USERS: Final = 24
"""So many that a split of 50 to 50 fails to show both versions once in eight million times."""
LIMIT_TRIES: Final = 3
"""On a busy machine Valkey may be late for a request, which the gateway's own share then counts: the limit is tried again."""
ROWS: Final = 16
ROW_TOKENS: Final = 16


class Booking(msgspec.Struct, forbid_unknown_fields=True):
    """Seats on a ferry."""

    to: Literal["Capri", "Ischia"]
    seats: Annotated[int, msgspec.Meta(ge=1, le=9999)]
    back: bool


SCHEMA: Final = msgspec.json.schema(Booking)["$defs"]["Booking"]


Found: TypeAlias = tuple[bool, str, str]
"""Whether a claim held, what was sent, and what came back."""


class Visit(AsyncExitStack):
    """One claim's visit to the demo. How to remove what it makes is entered here. `repeat`: the command for its last request."""

    def __init__(self, access: DemoAccess, installation: Installation, http: httpx.AsyncClient) -> None:
        super().__init__()
        self.access, self.installation, self.http = access, installation, http
        self.model, self.owners, self.first = access.model, access.tenants, access.tenants[0]
        self.repeat = "-"

    async def send(
        self, method: str, path: str, key: str, body: object = None, *refusals: int, etag: str = ""
    ) -> httpx.Response:
        """Send a request. Raises `httpx.HTTPError`, and `RequestFailed` for an error status not in `refusals`.

        What is in use is deleted once its last request has been settled.
        """
        if method != "DELETE":
            self.repeat = self._curl(method, path, key, body)
        headers = {"authorization": f"Bearer {key}"} | ({"if-match": etag} if etag else {})
        for _ in range(POLLS if method == "DELETE" else 1):
            answer = await self.http.request(method, path, json=body, headers=headers)
            if answer.is_success or answer.status_code in refusals:
                return answer
            await asyncio.sleep(POLL_S)
        raise RequestFailed(f"{method} {path}: HTTP {answer.status_code} {answer.text[:200]}")

    async def chat(self, model: str, key: str, *refusals: int, **fields: Any) -> httpx.Response:
        """Ask a question, greedily and for one token unless `fields` say otherwise. Raises as `send`."""
        messages = [{"role": "user", "content": QUESTION}]
        body = {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0, **fields}
        return await self.send("POST", "/v1/chat/completions", key, body, *refusals)

    async def replace(self, path: str, body: object) -> None:
        """Replace a resource of the first tenant. Raises as `send`."""
        etag = (await self.send("GET", path, self.first.admin_key)).headers["etag"]
        await self.send("PUT", path, self.first.admin_key, body, etag=etag)

    async def queues(self) -> list[dict[str, Any]]:
        """The newest report of each engine, about a second old at most."""
        answer = await self.send("GET", "/operator/v1/engine", self.access.operator_key)
        return [each["queues"] for each in answer.json()["engines"] if each["queues"]]

    def _curl(self, method: str, path: str, key: str, body: object) -> str:
        known = {self.first.api_key: "KEY", self.first.admin_key: "ADMIN_KEY"}
        variable = "OPERATOR_KEY" if key == self.access.operator_key else "OTHER_KEY"
        command = f"curl -sS -X {method} {quote(self.access.base_url + path)}"
        sent = f" -H 'Content-Type: application/json' -d {quote(json.dumps(body))}" if body else ""
        return f'{command} -H "Authorization: Bearer ${known.get(key, variable)}"{sent}'


async def one_step(visit: Visit) -> Found:
    """One step computes three tenants' adapters and the base model."""
    names, models = {BASE_MODEL: visit.model}, [(visit.model, visit.first.api_key)]
    for owner in visit.owners:
        models.append((owner.adapters[0], owner.api_key))
        names[(await visit.chat(*models[-1])).headers[DIGEST]] = f"{owner.name}'s {owner.adapters[0]}"
    chats = [asyncio.create_task(visit.chat(*each, max_tokens=512, ignore_eos=True)) for each in models]
    for chat in chats:
        visit.callback(chat.cancel)
    together: set[str] = set()
    while together != names.keys() and not any(chat.done() for chat in chats):
        await asyncio.sleep(POLL_S)
        steps = [names.keys() & each["step_adapters"] for each in await visit.queues()]
        together = max(together, *steps, key=len)
    # One that failed says why.
    await asyncio.gather(*(chat for chat in chats if chat.done()))
    rows = ", ".join(f"{names[each]} ({each[:8]})" for each in sorted(together))
    sent = (
        f"{len(chats)} chats at once, of {len(visit.owners)} tenants; what the engine reports while they run"
    )
    return together == names.keys(), sent, f"one step had rows of {rows}"


async def isolation(visit: Visit) -> Found:
    """Another tenant's adapter does not exist, and no cached prompt is shared."""
    first, other = visit.owners[:2]
    # No chat: its template begins with words that the tenant's earlier chats have cached.
    prompt = f"{uuid4().hex}. " + "The ferry to Capri leaves from the pier of the old harbor. " * 20
    body = {"model": visit.model, "prompt": prompt, "max_tokens": 1}
    keys = (first.api_key, first.api_key, other.api_key)
    answers = [(await visit.send("POST", "/v1/completions", key, body)).json() for key in keys]
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
    refused = await visit.chat(other.adapters[0], first.api_key, 404)
    code = refused.json().get("error", {}).get("code")
    return (
        refused.status_code == 404 and code == "model_not_found" and cached[1] > 0 == cached[0] == cached[2],
        f"a new prompt twice by {first.name}, once by {other.name}; {first.name}: {other.name}'s {other.adapters[0]}",
        f"cached tokens {cached[0]}, {cached[1]}, and {cached[2]} of {other.name}; HTTP {refused.status_code} {code}",
    )


async def schema(visit: Visit) -> Found:
    """A schema holds at temperature 2."""
    form = {"type": "json_schema", "json_schema": {"name": "booking", "strict": True, "schema": SCHEMA}}
    ask = partial(visit.chat, visit.model, visit.first.api_key, response_format=form, max_tokens=128)
    answers = await asyncio.gather(*(ask(temperature=2, seed=seed) for seed in range(4)))
    texts = [each.json()["choices"][0]["message"]["content"] for each in answers]
    valid = sum(map(_is_booking, texts))
    return (
        valid == len(texts),
        f"{len(texts)} chats with a JSON schema at temperature 2",
        f"{valid} of {len(texts)} validate, such as {' '.join(texts[0].split())}",
    )


async def tool(visit: Visit) -> Found:
    """A model calls a tool with valid arguments."""
    function = {"name": "book_ferry", "description": "Book seats on a ferry", "parameters": SCHEMA}
    answer = await visit.chat(
        visit.model,
        visit.first.api_key,
        messages=[{"role": "user", "content": "Book two seats to Capri, one way."}],
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=128,
    )
    choice = answer.json()["choices"][0]
    [call], ended = [each["function"] for each in choice["message"]["tool_calls"]], choice["finish_reason"]
    held = ended == "tool_calls" and call["name"] == "book_ferry" and _is_booking(call["arguments"])
    return held, "a question, and a tool that must be called", f"{ended}: {call['name']}({call['arguments']})"


def _is_booking(text: str) -> bool:
    try:
        return bool(msgspec.json.decode(text, type=Booking))
    except msgspec.DecodeError:
        return False


async def limit(visit: Visit) -> Found:
    """A limit of 10 admits exactly 10 of 30 requests, and says why."""
    admin, until = visit.first.admin_key, datetime.now(UTC) + KEY_LIFE
    body = {"name": "tour", "expires_at": f"{until:%FT%TZ}"}
    for _ in range(LIMIT_TRIES):
        made = (await visit.send("POST", "/tenant/v1/keys", admin, body)).json()
        path = f"/tenant/v1/keys/{made['id']}"
        visit.push_async_callback(visit.send, "DELETE", path, admin)
        await visit.replace(f"{path}/quotas", {"requests_per_minute": 10})
        answers = await asyncio.gather(*(visit.chat(visit.model, made["api_key"], 429) for _ in range(30)))
        if not any(MODE_HEADER in each.headers for each in answers):
            break
    refused = [each.headers["x-request-id"] for each in answers if each.status_code == 429]
    explained = await visit.send("GET", f"/tenant/v1/limits/explain/{[*refused, 'none'][0]}", admin)
    failed = [each for each in explained.json()["decisions"] if not each["passed"]]
    why = [f"{each['level']} {each['name']}, {each['used']} of {each['limit']} used" for each in failed]
    return (
        len(refused) == 20 and why == ["key requests_per_minute, 10 of 10 used"],
        "30 requests at once with a key of 10 per minute",
        f"{len(answers) - len(refused)} answered, {len(refused)} refused: {'; '.join(why)}",
    )


async def alias(visit: Visit) -> Found:
    """A split alias is undone by one request, and a header names what served."""
    first, name = visit.first, f"tour-{uuid4().hex[:8]}"
    path = f"/tenant/v1/adapters/{name}"
    production = f"{path}/aliases/production"
    for made in (path, production):
        visit.push_async_callback(visit.send, "DELETE", made, first.admin_key, None, 404)
    async with open_remote_push(visit.access.base_url, first.admin_key, first.name) as remote:
        push = partial(PushRequest, name=name, promote="first")
        pushes = [push(folder=ADAPTERS_FOLDER / each) for each in ("pirate", "support")]
        one, two = [(await remote.push(each)).digest or "" for each in pushes]
    await visit.replace(production, {"split": [{"version": each, "weight": 50} for each in (1, 2)]})
    during = await _served(visit, name)
    await visit.send("POST", f"{production}/rollback", first.admin_key)
    after = await _served(visit, name)
    await visit.chat(first.adapters[0], first.api_key)
    visit.repeat += f" -i | grep -i {DIGEST}"
    return (
        during.keys() == {one, two} and after == {one: USERS},
        f"{name}:production split 50 to 50, {USERS} users; its rollback, and they again",
        f"{one[:8]} {during[one]} times, {two[:8]} {during[two]} times; then {one[:8]} {after[one]} times",
    )


async def _served(visit: Visit, name: str) -> Counter[str]:
    """The digests that served requests of `USERS`."""
    chats = (visit.chat(name, visit.first.api_key, user=f"user-{number}") for number in range(USERS))
    return Counter(each.headers[DIGEST] for each in await asyncio.gather(*chats))


async def engine_kill(visit: Visit) -> Found:
    """A killed engine comes back, and the ledger has what clients know."""
    found, load = visit.installation, DrillLoad(max_tokens=8)
    fault = EngineKill(installation=found)
    await fault.check()
    report = await run_drill(fault, load, SILENT)
    kept = "; ".join(f"{each.name}: {each.found}" for each in report.promises)
    options = f"--data-dir {quote(str(found.data_dir))} --base-url {visit.access.base_url}"
    visit.repeat = f"loraplex drill engine-kill --yes {options}"
    sent = f"{report.requests} requests at {load.rate_per_s:g} per second, and SIGKILL to the engine"
    return report.survived, sent, f"{report.completed} answered, {dict(report.errors)}; {kept}"


async def invoice(visit: Visit) -> Found:
    """A final invoice is recomputed offline, and a changed copy refused."""
    listed = await visit.send("GET", "/tenant/v1/billing/invoices", visit.first.admin_key)
    final = [each for each in listed.json()["data"] if each["state"] in ("final", "paid")]
    newest = max(final, key=lambda each: each["month"])
    database = Database(visit.installation.database_url, pool_size=1)
    visit.push_async_callback(database.close)
    folder = Path(visit.enter_context(TemporaryDirectory())) / "invoice"
    async with database.as_operator() as session:
        await export_invoice(session, UUID(newest["id"]), folder)
    differs = verify_export(folder)
    rows = (folder / USAGE).read_text().rstrip()
    (folder / USAGE).write_text(f"{rows[:-1]}{(int(rows[-1]) + 1) % 10}\n")
    noticed = verify_export(folder)
    export = f"{newest['id']} ./invoice --data-dir {quote(str(visit.installation.data_dir))}"
    visit.repeat = f"loraplex invoice export {export} && loraplex invoice verify ./invoice"
    sent = (
        f"{newest['month']}: invoice {newest['number']} of {rows.count(chr(10))} rows, then one digit changed"
    )
    got = f"{[*differs, 'agrees in every digit'][0]}; then {[*noticed, 'nothing noticed'][0]}"
    return not differs and bool(noticed), sent, got


async def mixing(visit: Visit) -> Found:
    """Rows of three adapters share steps as rows of one do."""
    # Adapters are loaded before the clock runs.
    await _rows(visit, visit.owners, 1)
    mixed, steps = await _rows(visit, visit.owners, ROW_TOKENS)
    single, fewest = await _rows(visit, [visit.first], ROW_TOKENS)
    target = f"--base-url {visit.access.base_url} --api-key $KEY --target {visit.first.adapters[0]}"
    visit.repeat = f"loraplex bench serve {target} --output-len {ROW_TOKENS}"
    sent = f"{ROWS} chats of {ROW_TOKENS} tokens over {len(visit.owners)} adapters, then {ROWS} of one"
    rates = f"{mixed:.1f} tokens/s in {steps} steps, then {single:.1f} in {fewest}"
    # Adapters one after the other take three times the steps.
    return steps < 2 * fewest, sent, f"{rates}: {mixed / single:.2f} times the rate"


async def _rows(visit: Visit, owners: Sequence[DemoTenantAccess], tokens: int) -> tuple[float, int]:
    """Tokens per second of `ROWS` chats over the tenants' adapters, and the engines' steps. Raises `RequestFailed`."""
    before, began = sum(each["steps"] for each in await visit.queues()), time.perf_counter()
    rows = [owners[row % len(owners)] for row in range(ROWS)]
    chats = (visit.chat(each.adapters[0], each.api_key, max_tokens=tokens, ignore_eos=True) for each in rows)
    answers = [each.json()["usage"]["completion_tokens"] for each in await asyncio.gather(*chats)]
    rate = sum(answers) / (time.perf_counter() - began)
    for _ in range(POLLS):
        queues = await visit.queues()
        steps = sum(each["steps"] for each in queues) - before
        if steps >= tokens and not any(each["running"] for each in queues):
            return rate, steps
        await asyncio.sleep(POLL_S)
    raise RequestFailed(f"the engines still run, and report {steps} steps")


CLAIMS: Final = (one_step, isolation, schema, tool, limit, alias, engine_kill, invoice, mixing)


def tour_command(
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="The demo's data directory.")] = None,
) -> None:
    """Try nine claims on the running demo, in less than a minute. It kills the demo's engine once; what it makes it removes."""
    with exit_codes():
        try:
            held = asyncio.run(_tour(data_dir))
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise StartError("stopped before the end; what the claim had made was removed") from None
    if not held:
        raise typer.Exit(1)


async def _tour(data_dir: Path | None) -> bool:
    """Return whether all claims held. SIGTERM ends it as Ctrl-C does. Raises `StartError` where no demo runs."""
    end_at_sigterm()
    settings, show = load_settings({"data_dir": data_dir}), Console(soft_wrap=True, highlight=False).print
    access = read_demo_file(settings.data_dir)
    if access is None:
        raise StartError(f"no demo in {settings.data_dir}: start one with `loraplex serve --demo`")
    found, held = await find_installation(settings, (access.base_url,)), 0
    show(
        f"{len(CLAIMS)} claims about {access.base_url}. Claim 7 kills the demo's engine once. Keys for the commands:"
    )
    path = quote(str(found.data_dir / DEMO_FILE))
    show(f"   read -r KEY ADMIN_KEY OPERATOR_KEY < <(python3 -c '{READ_KEYS}' {path})", markup=False)
    async with httpx.AsyncClient(base_url=access.base_url, timeout=TIMEOUT_S) as http:
        for number, claim in enumerate(CLAIMS, 1):
            began = time.monotonic()
            visit = Visit(access, found, http)
            try:
                async with visit:
                    result = await claim(visit)
            except FAILURES as error:
                result = (False, "-", f"{type(error).__name__}: {error}")
            held += result[0]
            verdict = "[green]held[/green]" if result[0] else "[red]BROKEN[/red]"
            show(f"{number}. {claim.__doc__} {verdict}, {time.monotonic() - began:.1f} s")
            show(f"   sent   {result[1]}\n   got    {result[2]}\n   repeat {visit.repeat}", markup=False)
    show(f"{held} of {len(CLAIMS)} claims held.")
    return held == len(CLAIMS)
