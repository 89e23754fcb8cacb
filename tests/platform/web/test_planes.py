"""A change, its audit rows and its stored response are committed together or not at all."""

import asyncio
import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from tests.platform.web.hand_made_requests import request
from tests.tenants.registry_records import RegistryWriter, make_tenant

from loraplex.platform.auth.authenticator import Authenticator, Caller
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.platform.server.secret import derive
from loraplex.platform.web.planes import Planes, TenantRequest
from loraplex.platform.web.request_bodies import RequestModel, request_model
from loraplex.platform.web.responses import REPLAYED_HEADER, ApiResponse, ResponseModel
from loraplex.platform.web.sorting import SortOrder, by_text
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import (
    IdempotencyInUse,
    IdempotencyMismatch,
    StoredResponseUnreadable,
    ValkeyUnavailable,
)
from loraplex.tenants.unit_of_work import UnitOfWork

BY_LETTER: SortOrder[Any, str] = by_text(lambda made: made.name)


class Made(ResponseModel):
    name: str
    secret: str


class Anything(RequestModel):
    name: str = ""


@dataclass
class Policies:
    """Records publications; `down`: Valkey does not respond."""

    published: list[UUID] = field(default_factory=list)
    down: bool = False

    async def publish(self, tenant_id: UUID) -> None:
        if self.down:
            raise ValkeyUnavailable("no answer")
        self.published.append(tenant_id)


@dataclass
class Making:
    """Work that makes an adapter, notes it, and answers with a secret; `begun` and `go` hold it where a test wants."""

    planes: Planes
    caller: Caller
    policies: Policies
    runs: int = 0
    failure: Exception | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def work(self, uow: UnitOfWork) -> ApiResponse:
        self.runs += 1
        self.begun.set()
        name = f"made-{self.runs}"
        await RegistryWriter(uow.session, self.caller.tenant_id).get_or_create(name)
        await uow.audit.record("adapter.create", f"adapters/{name}", None, {"name": name})
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        return ApiResponse(
            201, Made(name=name, secret="shown once"), etag=1, headers={"location": f"/{name}"}
        )

    async def has_begun(self) -> None:
        """Within seconds, or the work never will."""
        async with asyncio.timeout(60):
            await self.begun.wait()

    async def post(
        self, key: str | None = "k-1", body: object = None, path: str = "/tenant/v1/adapters"
    ) -> Any:
        headers = {} if key is None else {"idempotency-key": key}
        made = request("POST", path, headers=headers, body=body or {})
        await request_model(Anything).dependency(made)
        return await requested(self, made).run(self.work)


def requested(making: "Making", made: Request) -> TenantRequest:
    """The request of the caller, whose work says itself how it is answered."""
    return TenantRequest(making.planes, made, making.caller).replying(lambda response: response)


def planes_of(database: Database, policies: Policies, secret: bytes = b"s" * 32) -> Planes:
    dependencies: Any = SimpleNamespace(
        database=database,
        policy_publisher=policies,
        derive_key=lambda *parts: derive(secret, *parts),
        config=ServingConfig(),
    )
    return Planes(dependencies, Authenticator(database, 0))


async def caller_of(database: Database, tenant_id: UUID) -> Caller:
    async with database.as_operator() as session:
        key = (await KeyRepository(session).create(tenant_id, "key", ["tenant:admin"])).plaintext
    return await Authenticator(database, 0).authenticate([f"Bearer {key}"])


@pytest.fixture
async def making(database: Database) -> Making:
    policies = Policies()
    caller = await caller_of(database, await make_tenant(database))
    made = Making(planes_of(database, policies), caller, policies)
    made.go.set()
    return made


async def counts(database: Database) -> tuple[int, ...]:
    """Numbers of adapters, audit entries and stored responses."""
    tables = ("adapters", "audit_entries", "idempotency_records")
    async with database.as_operator() as session:
        return tuple(
            [(await session.execute(text(f"SELECT count(*) FROM {table}"))).scalar_one() for table in tables]
        )


async def test_a_change_and_its_audit_entry_are_committed_together(
    making: Making, database: Database
) -> None:
    answer = await making.post(None)
    assert (answer.status_code, answer.headers["etag"], answer.headers["location"]) == (201, '"1"', "/made-1")
    assert answer.body == b'{"name":"made-1","secret":"shown once"}'
    assert await counts(database) == (1, 1, 0)
    assert making.policies.published == [making.caller.tenant_id]


@pytest.mark.parametrize("key", [None, "k-1"])
async def test_a_failure_leaves_nothing(making: Making, database: Database, key: str | None) -> None:
    making.failure = InvalidParameter("no", param="name")
    with pytest.raises(InvalidParameter):
        await making.post(key)
    assert await counts(database) == (0, 0, 0) and making.policies.published == []
    making.failure = None
    assert (await making.post(key)).status_code == 201


async def test_a_repeated_post_gets_the_same_response(making: Making, database: Database) -> None:
    first, again = [await making.post() for _ in range(2)]
    assert making.runs == 1 and await counts(database) == (1, 1, 1)
    assert (first.status_code, first.body) == (again.status_code, again.body)
    assert first.headers.items() == [each for each in again.headers.items() if each[0] != REPLAYED_HEADER]
    assert again.headers[REPLAYED_HEADER] == "true"
    assert (await making.post("k-2")).body != first.body
    other = Making(making.planes, await caller_of(database, making.caller.tenant_id), making.policies, runs=5)
    other.go.set()
    assert (await other.post()).body != first.body


async def test_another_request_with_the_key_is_refused(making: Making) -> None:
    await making.post(body={"name": "a"})
    assert (await making.post(body={"name": "a"})).headers[REPLAYED_HEADER] == "true"
    with pytest.raises(IdempotencyMismatch):
        await making.post(body={"name": "b"})
    with pytest.raises(IdempotencyMismatch):
        await making.post(body={"name": "a"}, path="/tenant/v1/keys")
    assert making.runs == 1


async def test_one_of_two_concurrent_requests_works(making: Making, database: Database) -> None:
    making.go.clear()
    first = asyncio.create_task(making.post())
    await making.has_begun()
    with pytest.raises(IdempotencyInUse):
        await making.post()
    making.go.set()
    assert (await first).status_code == 201
    assert (await making.post()).headers[REPLAYED_HEADER] == "true"
    assert making.runs == 1 and await counts(database) == (1, 1, 1)


async def test_many_concurrent_requests_create_one(making: Making, database: Database) -> None:
    answers = await asyncio.gather(*(making.post() for _ in range(8)), return_exceptions=True)
    bodies = {answer.body for answer in answers if not isinstance(answer, BaseException)}
    assert len(bodies) == 1 and await counts(database) == (1, 1, 1)
    assert all(isinstance(each, IdempotencyInUse) for each in answers if isinstance(each, BaseException))


async def test_a_crash_before_the_commit_leaves_the_key_free(making: Making, database: Database) -> None:
    making.go.clear()
    running = asyncio.create_task(making.post())
    await making.has_begun()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await counts(database) == (0, 0, 0)
    making.go.set()
    assert REPLAYED_HEADER not in (await making.post()).headers
    assert await counts(database) == (1, 1, 1)


async def test_after_a_crash_the_repetition_gets_the_same_response(
    making: Making, database: Database
) -> None:
    """The gateway dies before it responds: another one, with the same secret, returns the response."""
    lost = await making.post()
    other = Making(planes_of(database, Policies()), making.caller, making.policies)
    assert (await other.post()).body == lost.body and other.runs == 0


async def test_a_stored_response_is_encrypted(making: Making, database: Database) -> None:
    await making.post()
    async with database.as_operator() as session:
        stored = (await session.execute(text("SELECT * FROM idempotency_records"))).one()
        assert b"shown once" not in stored.sealed_answer and stored.status == 201
        # A record moved to another key does not open there.
        await session.execute(text("UPDATE idempotency_records SET idempotency_key = 'k-9'"))
    with pytest.raises(StoredResponseUnreadable):
        await making.post("k-9")
    strange = Making(planes_of(database, Policies(), b"t" * 32), making.caller, making.policies)
    with pytest.raises(StoredResponseUnreadable):
        await strange.post("k-9")


async def test_an_old_response_is_deleted(making: Making, database: Database) -> None:
    await making.post()
    async with database.as_operator() as session:
        await session.execute(text("UPDATE idempotency_records SET expires_at = now()"))
    assert REPLAYED_HEADER not in (await making.post(body={"name": "b"})).headers
    assert making.runs == 2 and await counts(database) == (2, 2, 1)


async def test_keys_that_are_refused(making: Making) -> None:
    for key in ("", "a b", "k" * 256, "ö"):
        with pytest.raises(InvalidParameter, match="Idempotency-Key"):
            await making.post(key)
    assert making.runs == 0


async def test_only_a_post_is_stored(making: Making, database: Database) -> None:
    made: Request = request("PUT", headers={"idempotency-key": "k"})
    for _ in range(2):
        await requested(making, made).run(making.work)
    assert await counts(database) == (2, 2, 0)


async def test_a_change_that_cannot_be_published_stays_committed(making: Making, database: Database) -> None:
    making.policies.down = True
    assert (await making.post()).status_code == 201
    assert await counts(database) == (1, 1, 1)


async def letters(making: Making, caller: Caller, path: str, query: str) -> Any:
    """The document of a listing of three."""
    asked = TenantRequest(making.planes, request(path=path, query=query), caller)
    asked.http.scope["route"] = SimpleNamespace(status_code=None)
    page = asked.page(BY_LETTER)

    async def rows(session: AsyncSession) -> list[Made]:
        found = [letter for letter in "abc" if page.after is None or letter > page.after][: page.fetch]
        return [Made(name=letter, secret="") for letter in found]

    return json.loads(bytes((await asked.listing(page, rows)).body))


async def test_a_cursor_is_valid_for_one_tenant_and_path(making: Making, database: Database) -> None:
    rival = await caller_of(database, await make_tenant(database, "rival"))
    first = await letters(making, making.caller, "/a", "limit=2")
    assert first["data"] == [{"name": "a", "secret": ""}, {"name": "b", "secret": ""}]
    cursor = f"cursor={first['next_cursor']}"
    assert await letters(making, making.caller, "/a", cursor) == {
        "data": [{"name": "c", "secret": ""}],
        "next_cursor": None,
    }
    for path, caller in (("/b", making.caller), ("/a", rival)):
        with pytest.raises(InvalidParameter, match="cursor"):
            await letters(making, caller, path, cursor)


async def test_errors_over_http(start_gateway: Any) -> None:
    gateway = await start_gateway()
    key = await gateway.tenant("boss", ("tenant:admin",))
    async with httpx.AsyncClient(base_url=gateway.url, headers={"authorization": f"Bearer {key}"}) as client:
        listing = await client.get("/tenant/v1/audit")
        assert (listing.status_code, listing.json()) == (200, {"data": [], "next_cursor": None})
        for query, code in (("limit=0", "invalid_value"), ("x=1", "unknown_parameter")):
            answer = await client.get(f"/tenant/v1/audit?{query}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
        document = (await client.get("/openapi.json")).json()
    audit = document["paths"]["/tenant/v1/audit"]["get"]
    assert {each["name"] for each in audit["parameters"]} == {"cursor", "limit", "action", "target", "actor"}
    assert "HTTPValidationError" not in str(document)
    for status in ("400", "401", "403", "503"):
        schema = audit["responses"][status]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorDocument"}


async def test_the_openapi_document_is_rendered_once(
    start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway()
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        first = await client.get("/openapi.json")
        monkeypatch.setattr(gateway.app, "openapi", lambda: pytest.fail("rendered again"))
        again = await client.get("/openapi.json")
        known = await client.get("/openapi.json", headers={"if-none-match": first.headers["etag"]})
        other = await client.get("/openapi.json", headers={"if-none-match": '"other"'})
        assert (await client.get("/docs")).status_code == 200
    assert first.content == again.content == other.content and first.json()["openapi"]
    assert (known.status_code, known.content, known.headers["etag"]) == (304, b"", first.headers["etag"])
