"""The upload routes on a real database, over a real port, into a folder and a bucket."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text
from tests.platform.web.adapters.upload_program import upload_app
from tests.platform.web.gateway import served
from tests.platform.web.upload_server import CONFIG, WEIGHTS, UploadHome, content_digest, declared
from tests.tenants.registry_records import RegistryWriter

from loraplex.adapters.errors import BlobStoreUnavailable, ValidationShareExceeded
from loraplex.adapters.limits import UploadConfig
from loraplex.adapters.uploads.cleanup import UploadCleanup
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.models import Quota

FILES = {CONFIG: b'{"r": 8}', WEIGHTS: os.urandom(2500)}
PLANE = "/tenant/v1"


class Tenant:
    """A client of one tenant's key."""

    def __init__(self, url: str, key: str, home: UploadHome) -> None:
        headers = {"authorization": f"Bearer {key}"}
        self.http = httpx.AsyncClient(base_url=f"{url}{PLANE}", headers=headers, timeout=120)
        self.url = url
        self.home = home

    async def other(self, name: str, *scopes: str) -> "Tenant":
        """A client of another tenant."""
        return Tenant(self.url, await new_key(self.home.database, name, scopes), self.home)

    async def open(self, files: dict[str, bytes] | None = None, **headers: str) -> dict[str, Any]:
        body = {"files": declared(files or FILES)}
        response = await self.http.post("/adapters/support/uploads", json=body, headers=headers)
        assert response.status_code == 201, response.text
        return dict(response.json())

    async def put(self, upload: str, file: str, number: int, content: Any, **headers: str) -> httpx.Response:
        path = f"/uploads/{upload}/{file}/parts/{number}"
        return await self.http.put(path, content=content, headers=headers)

    async def put_all(self, upload: str, files: dict[str, bytes] | None = None) -> None:
        for file, content in (files or FILES).items():
            for start in range(0, len(content), 1000):
                response = await self.put(upload, file, start // 1000 + 1, content[start : start + 1000])
                assert response.status_code == 200, response.text

    async def complete(self, upload: str) -> httpx.Response:
        return await self.http.post(f"/uploads/{upload}/complete")

    async def post(self, files: dict[str, bytes] | None = None, once: str | None = None) -> httpx.Response:
        """`once` is an Idempotency-Key."""
        headers = {} if once is None else {"idempotency-key": once}
        parts = {name: ("ignored", content) for name, content in (files or FILES).items()}
        return await self.http.post("/adapters/support/versions", files=parts, headers=headers)


StartTenant = Callable[..., Awaitable[Tenant]]


@pytest.fixture(params=["local", "s3"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def new_key(database: Database, tenant: str, scopes: Sequence[str], **quota: int) -> str:
    """Of a new tenant; one that may write has the adapter `support`."""
    async with database.as_operator() as session:
        owner = await TenantRepository(session).create(tenant)
        if "adapters:write" in scopes:
            await RegistryWriter(session, owner.id).get_or_create("support")
        if quota:
            session.add(Quota(tenant_id=owner.id, **quota))
        return (await KeyRepository(session).create(owner.id, "key", scopes)).plaintext


@pytest.fixture
async def start(
    database: Database, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[StartTenant]:
    """A server of the upload routes, and a tenant's client."""
    async with AsyncExitStack() as stack:

        async def make(
            kind: str = "local",
            limits: UploadConfig | None = None,
            max_weights_bytes: int = 1 << 30,
            **quota: int,
        ) -> Tenant:
            bucket = request.getfixturevalue("s3_bucket") if kind == "s3" else None
            limits = limits or UploadConfig(part_bytes=1000)
            home = UploadHome(database, tmp_path / "home", bucket, limits, max_weights_bytes)
            url = await stack.enter_async_context(served(upload_app(database, home)))
            tenant = Tenant(url, await new_key(database, "writer", ("adapters:write",), **quota), home)
            await stack.enter_async_context(tenant.http)
            return tenant

        yield make


def code(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


async def test_a_folder_in_one_request(start: StartTenant) -> None:
    tenant = await start()
    response = await tenant.post()
    assert response.status_code == 202
    assert response.json() == {"name": "support", "version": 1, "digest": None, "state": "validating"}
    assert tenant.home.taken() == FILES
    assert tenant.home.left() == []


async def test_an_idempotency_key_creates_one_version(start: StartTenant) -> None:
    tenant = await start()
    first, again = [await tenant.post(once="once") for _ in range(2)]
    assert first.json() == again.json() and len(tenant.home.lifecycle.taken) == 1
    other = await tenant.post({**FILES, CONFIG: b"{}"}, once="once")
    assert code(other)[:2] == (422, "idempotency_mismatch")
    assert (await tenant.post(once="twice")).json()["version"] == 2
    tenant.home.lifecycle.error = BlobStoreUnavailable("down")
    assert (await tenant.post(once="third")).status_code == 503
    tenant.home.lifecycle.error = ValidationShareExceeded("2 versions of this tenant wait already")
    own = await tenant.post(once="third")
    assert code(own)[:2] == (429, "rate_limit_exceeded") and own.headers["retry-after"] == "30"
    assert own.headers["x-loraplex-limit"] == "waiting_versions"
    tenant.home.lifecycle.error = None
    assert (await tenant.post(once="third")).json()["version"] == 3
    assert tenant.home.left() == []


async def test_parts_in_any_order_and_in_parallel(start: StartTenant, kind: str) -> None:
    tenant = await start(kind)
    upload = await tenant.open()
    assert upload["part_size"] == 1000 and upload["state"] == "open" and upload["received"] == []
    weights = FILES[WEIGHTS]
    early = await tenant.complete(upload["id"])
    assert code(early) == (409, "parts_missing", "parts")
    assert f"{CONFIG} 1, {WEIGHTS} 1, {WEIGHTS} 2, {WEIGHTS} 3" in early.json()["error"]["message"]
    digest = {"content-digest": content_digest(weights[1000:2000])}
    responses = await asyncio.gather(
        tenant.put(upload["id"], WEIGHTS, 3, weights[2000:]),
        tenant.put(upload["id"], WEIGHTS, 2, weights[1000:2000], **digest),
        tenant.put(upload["id"], WEIGHTS, 2, weights[1000:2000]),
        tenant.put(upload["id"], WEIGHTS, 2, weights[1000:2000]),
        tenant.put(upload["id"], CONFIG, 1, FILES[CONFIG]),
    )
    assert {response.status_code for response in responses} == {200}
    shown = (await tenant.http.get(f"/uploads/{upload['id']}")).json()
    assert [(part["file"], part["number"]) for part in shown["received"]] == [
        (CONFIG, 1),
        (WEIGHTS, 2),
        (WEIGHTS, 3),
    ]
    await tenant.put(upload["id"], WEIGHTS, 1, weights[:1000])
    done = await tenant.complete(upload["id"])
    assert done.json() == {"name": "support", "version": 1, "digest": None, "state": "validating"}
    assert (done.status_code, tenant.home.taken()) == (202, FILES)
    assert (await tenant.complete(upload["id"])).json() == done.json()
    assert len(tenant.home.lifecycle.taken) == 1
    assert (await tenant.http.get(f"/uploads/{upload['id']}")).json()["state"] == "completed"
    assert await tenant.home.parts.uploads() == [] and tenant.home.left() == []
    assert code(await tenant.put(upload["id"], CONFIG, 1, FILES[CONFIG]))[:2] == (409, "conflict")
    assert code(await tenant.http.delete(f"/uploads/{upload['id']}"))[:2] == (409, "conflict")


async def test_undeclared_content_is_refused(start: StartTenant, kind: str) -> None:
    tenant = await start(kind)
    upload = await tenant.open()
    wrong = {**FILES, WEIGHTS: FILES[WEIGHTS][:-1] + bytes([FILES[WEIGHTS][-1] ^ 1])}
    await tenant.put_all(upload["id"], wrong)
    response = await tenant.complete(upload["id"])
    assert code(response) == (400, "checksum_mismatch", WEIGHTS)
    assert tenant.home.left() == [] and tenant.home.lifecycle.taken == []
    await tenant.put(upload["id"], WEIGHTS, 3, FILES[WEIGHTS][2000:])
    assert (await tenant.complete(upload["id"])).status_code == 202
    assert tenant.home.taken() == FILES


async def test_an_aborted_upload_leaves_nothing(start: StartTenant, kind: str) -> None:
    tenant = await start(kind, max_adapter_bytes=3000)
    upload = await tenant.open()
    await tenant.put_all(upload["id"])
    assert code(await tenant.post())[:2] == (409, "limit_reached")
    assert [(await tenant.http.delete(f"/uploads/{upload['id']}")).status_code for _ in range(2)] == [204] * 2
    assert await tenant.home.parts.uploads() == [] and tenant.home.left() == []
    assert (await tenant.http.get(f"/uploads/{upload['id']}")).json()["state"] == "aborted"
    assert (await tenant.post()).status_code == 202


NO_PARTS: list[tuple[str, str, int, tuple[int, str, str | None]]] = [
    (WEIGHTS, "1", 1001, (413, "request_too_large", None)),
    (WEIGHTS, "1", 999, (400, "invalid_value", WEIGHTS)),
    (WEIGHTS, "3", 1000, (413, "request_too_large", None)),
    (WEIGHTS, "4", 1000, (400, "invalid_value", WEIGHTS)),
    (WEIGHTS, "0", 1000, (400, "invalid_value", WEIGHTS)),
    (WEIGHTS, "-1", 1000, (400, "invalid_value", WEIGHTS)),
    (WEIGHTS, "one", 1000, (400, "invalid_value", WEIGHTS)),
    (WEIGHTS, "9" * 30, 1000, (400, "invalid_value", WEIGHTS)),
    (CONFIG, "2", 8, (400, "invalid_value", CONFIG)),
    ("adapter_model.bin", "1", 8, (400, "invalid_value", "adapter_model.bin")),
    ("..", "1", 8, (400, "invalid_value", "..")),
]


async def test_parts_that_an_upload_does_not_have(start: StartTenant) -> None:
    tenant = await start()
    upload = await tenant.open()

    async def chunked(size: int) -> AsyncIterator[bytes]:
        yield b"x" * size

    for file, number, size, expected in NO_PARTS:
        for content in (b"x" * size, chunked(size)):
            path = f"/uploads/{upload['id']}/{file.replace('.', '%2e')}/parts/{number}"
            response = await tenant.http.put(path, content=content)
            assert code(response) == expected, (file, number)
    assert tenant.home.left() == [] and await tenant.home.parts.uploads() == []


async def test_a_part_with_another_hash_is_refused(start: StartTenant) -> None:
    tenant = await start()
    upload = await tenant.open()
    content = FILES[CONFIG]
    wrong = await tenant.put(upload["id"], CONFIG, 1, content, **{"content-digest": content_digest(b"x")})
    assert code(wrong) == (400, "checksum_mismatch", CONFIG)
    for header in ("sha-256=:x:", "md5=:AAAA:", "", f"sha-256={'a' * 64}"):
        response = await tenant.put(upload["id"], CONFIG, 1, content, **{"content-digest": header})
        assert code(response) == (400, "invalid_value", "Content-Digest")
    both = f"sha-512=:AAAA:, {content_digest(content)}"
    assert (await tenant.put(upload["id"], CONFIG, 1, content, **{"content-digest": both})).status_code == 200
    assert tenant.home.left() == []


BODIES: list[tuple[Any, str]] = [
    ({}, "files"),
    ({"files": []}, "files"),
    ({"files": declared(FILES)[:1]}, "files"),
    ({"files": [declared(FILES)[0]] * 2}, "body"),
    ({"files": [{**declared(FILES)[0], "name": "../x"}, declared(FILES)[1]]}, "files.0.name"),
    ({"files": [declared(FILES)[0], {**declared(FILES)[1], "name": "adapter_model.bin"}]}, "files.1.name"),
    ({"files": [{**declared(FILES)[0], "size": 0}, declared(FILES)[1]]}, "files.0.size"),
    ({"files": [{**declared(FILES)[0], "size": 300_000}, declared(FILES)[1]]}, "body"),
    ({"files": [{**declared(FILES)[0], "size": "8"}, declared(FILES)[1]]}, "files.0.size"),
    ({"files": [declared(FILES)[0], {**declared(FILES)[1], "size": 5 << 30}]}, "files.1.size"),
    ({"files": [{**declared(FILES)[0], "sha256": "A" * 64}, declared(FILES)[1]]}, "files.0.sha256"),
    ({"files": declared(FILES), "part_size": 7}, "part_size"),
]


async def test_declarations_that_are_refused(start: StartTenant) -> None:
    tenant = await start()
    for body, param in BODIES:
        response = await tenant.http.post("/adapters/support/uploads", json=body)
        assert response.status_code == 400, body
        assert ("adapter_model.bin" in str(body)) == ("weights_only=True" in response.text), body
        assert (response.json()["error"]["param"] or "body").startswith(param), (body, response.text)


async def test_resources_of_another_tenant_do_not_exist(start: StartTenant) -> None:
    tenant = await start()
    upload = (await tenant.open())["id"]
    rival = await tenant.other("rival", "tenant:admin")
    async with rival.http:
        body = {"files": declared(FILES)}
        for identity in (upload, upload.upper(), "x", "%00", "00000000-0000-0000-0000-000000000000"):
            responses = [
                await rival.http.get(f"/uploads/{identity}"),
                await rival.http.delete(f"/uploads/{identity}"),
                await rival.complete(identity),
                await rival.put(identity, CONFIG, 1, b"x"),
            ]
            assert {code(response)[:2] for response in responses} == {(404, "not_found")}, identity
        assert code(await rival.post())[:2] == (404, "not_found")
        assert code(await rival.http.post("/adapters/support/uploads", json=body))[:2] == (404, "not_found")
    assert tenant.home.left() == []
    assert (await tenant.http.get(f"/uploads/{upload}")).status_code == 200


async def test_the_scope_is_needed(start: StartTenant) -> None:
    tenant = await start()
    upload = (await tenant.open())["id"]
    reader = await tenant.other("reader", "adapters:read", "inference")
    async with reader.http:
        for response in (await reader.post(), await reader.put(upload, CONFIG, 1, b"x")):
            assert code(response)[:2] == (403, "insufficient_scope")


async def test_limits_of_a_tenant(start: StartTenant) -> None:
    limits = UploadConfig(part_bytes=1000, max_open=1)
    tenant = await start(limits=limits, max_adapter_bytes=5000)
    too_much = {**FILES, WEIGHTS: b"w" * 5000}
    body = {"files": declared(too_much)}
    response = await tenant.http.post("/adapters/support/uploads", json=body)
    assert code(response)[:2] == (409, "limit_reached")
    assert code(await tenant.post(too_much))[:2] == (409, "limit_reached")
    await tenant.open()
    response = await tenant.http.post("/adapters/support/uploads", json={"files": declared(FILES)})
    assert code(response)[:2] == (409, "limit_reached")
    assert tenant.home.left() == []


async def test_the_bytes_of_a_whole_adapter_are_reserved_before_they_arrive(start: StartTenant) -> None:
    tenant = await start(max_adapter_bytes=500_000)
    sending, finish = asyncio.Event(), asyncio.Event()
    large = {**FILES, WEIGHTS: b"w" * 300_000}
    request = tenant.http.build_request(
        "POST", "/adapters/support/versions", files={name: ("x", content) for name, content in large.items()}
    )
    body = request.read()

    async def slow() -> AsyncIterator[bytes]:
        yield body[:1000]
        sending.set()
        await finish.wait()
        yield body[1000:]

    headers = {name: request.headers[name] for name in ("content-type", "content-length")}
    first = asyncio.create_task(
        tenant.http.post("/adapters/support/versions", content=slow(), headers=headers)
    )
    await sending.wait()
    async with asyncio.timeout(60):
        while not await open_uploads(tenant):
            await asyncio.sleep(0.01)
    assert code(await tenant.post(large))[:2] == (409, "limit_reached")
    finish.set()
    assert (await first).status_code == 202
    assert await open_uploads(tenant) == 0 and tenant.home.left() == []


async def open_uploads(tenant: Tenant) -> int:
    async with tenant.home.database.as_operator() as session:
        return await session.scalar(text("SELECT count(*) FROM uploads WHERE state = 'open'")) or 0


async def test_a_failed_body_gives_its_bytes_back(start: StartTenant) -> None:
    tenant = await start(max_adapter_bytes=500_000)
    for _ in range(2):
        response = await tenant.post({**FILES, "other.bin": b"x" * 400_000})
        assert code(response) == (400, "unknown_parameter", "other.bin")
    assert await open_uploads(tenant) == 0


async def test_a_body_of_unknown_size_reserves_the_most(start: StartTenant) -> None:
    tenant = await start(max_adapter_bytes=(1 << 30) + (64 << 10) - 1)
    request = tenant.http.build_request(
        "POST", "/adapters/support/versions", files={name: ("x", content) for name, content in FILES.items()}
    )
    headers, body = {"content-type": request.headers["content-type"]}, request.read()

    async def chunked() -> AsyncIterator[bytes]:
        yield body

    response = await tenant.http.post("/adapters/support/versions", content=chunked(), headers=headers)
    assert code(response)[:2] == (409, "limit_reached")


async def test_no_upload_is_larger_than_an_adapter_of_the_model(start: StartTenant) -> None:
    tenant = await start(max_weights_bytes=2499)
    body = {"files": declared(FILES)}
    response = await tenant.http.post("/adapters/support/uploads", json=body)
    assert code(response) == (413, "request_too_large", WEIGHTS)
    assert code(await tenant.post()) == (413, "request_too_large", WEIGHTS)
    smaller = {**FILES, WEIGHTS: FILES[WEIGHTS][:2499]}
    await tenant.put_all((await tenant.open(smaller))["id"], smaller)
    assert tenant.home.left() == []


async def test_concurrent_bodies_are_bounded(start: StartTenant) -> None:
    limits = UploadConfig(part_bytes=1000, max_in_flight_per_tenant=1)
    tenant = await start(limits=limits)
    upload = (await tenant.open())["id"]
    sending, finish = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield FILES[WEIGHTS][:500]
        sending.set()
        await finish.wait()
        yield FILES[WEIGHTS][500:1000]

    first = asyncio.create_task(tenant.put(upload, WEIGHTS, 1, slow()))
    await sending.wait()
    # A request that came before the first had its slot would have the first one refused.
    async with asyncio.timeout(60):
        while not tenant.home.left():
            await asyncio.sleep(0.01)
    response = await tenant.put(upload, CONFIG, 1, FILES[CONFIG])
    assert code(response)[:2] == (429, "rate_limit_exceeded") and response.headers["retry-after"] == "1"
    assert response.headers["x-loraplex-limit"] == "uploads"
    finish.set()
    assert (await first).status_code == 200
    assert (await tenant.put(upload, CONFIG, 1, FILES[CONFIG])).status_code == 200


async def test_an_interrupted_upload_leaves_nothing(start: StartTenant) -> None:
    tenant = await start()
    upload = (await tenant.open())["id"]
    host, port = tenant.url.removeprefix("http://").split(":")
    key = tenant.http.headers["authorization"]
    for line, kind in (
        (f"PUT {PLANE}/uploads/{upload}/{WEIGHTS}/parts/1", "application/octet-stream"),
        (f"POST {PLANE}/adapters/support/versions", "multipart/form-data; boundary=x"),
    ):
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"{line} HTTP/1.1\r\nhost: x\r\nauthorization: {key}\r\ncontent-type: {kind}\r\ncontent-length: 900\r\n\r\n"
        writer.write(
            head.encode() + f'--x\r\nContent-Disposition: form-data; name="{WEIGHTS}"\r\n\r\nabc'.encode()
        )
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
    async with asyncio.timeout(60):
        while tenant.home.left():
            await asyncio.sleep(0.02)
    assert (await tenant.http.get(f"/uploads/{upload}")).json()["received"] == []


async def test_the_cleanup_removes_expired_uploads(start: StartTenant, database: Database, kind: str) -> None:
    tenant = await start(kind)
    home = tenant.home
    cleaner = UploadCleanup(database, home.parts, home.storage)
    kept, overdue, unknown = [(await tenant.open())["id"] for _ in range(3)]
    for upload in (kept, overdue, unknown):
        await tenant.put_all(upload)
    async with database.as_operator() as session:
        await session.execute(text("UPDATE uploads SET expires_at = now() WHERE id = :id"), {"id": overdue})
        await session.execute(text("DELETE FROM uploads WHERE id = :id"), {"id": unknown})
    await cleaner.end_overdue()
    assert {str(upload) for _, upload in await home.parts.uploads()} == {kept, unknown}
    await cleaner.sweep()
    assert {str(upload) for _, upload in await home.parts.uploads()} == {kept}
    assert (await tenant.http.get(f"/uploads/{overdue}")).json()["state"] == "expired"
    old = home.objects.spooled()
    old.write_bytes(b"left by a process that died")
    staged = home.storage.make_staged()
    for path in (old, staged):
        os.utime(path, (0, 0))
    await cleaner.sweep()
    assert home.left() == []
    assert (await tenant.complete(kept)).status_code == 202
