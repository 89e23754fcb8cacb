"""Uploads on a small file system that fills up: they get 507, and everything else of the gateway goes on."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.platform.web.upload_server import CONFIG, WEIGHTS, UploadHome, declared
from tests.tenants.registry_records import RegistryWriter

from loraplex.adapters.limits import UploadConfig
from loraplex.adapters.storage.object_store import S3Options
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.database import Database

MIB = 1 << 20
DISK_BYTES, FLOOR_BYTES, PART_BYTES, PARTS = 16 * MIB, 6 * MIB, 2 * MIB, 8
FILES = {CONFIG: b'{"r": 8}', WEIGHTS: os.urandom(PARTS * PART_BYTES)}
COMPLETION: Any = {"model": "demo/base", "prompt": [[1, 2, 3, 4]], "max_tokens": 6}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own of `DISK_BYTES`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def home_of(
    database: Database, folder: Path, floor_bytes: int, bucket: S3Options | None = None
) -> UploadHome:
    limits = UploadConfig(part_bytes=PART_BYTES, storage_floor_bytes=floor_bytes)
    return UploadHome(database, folder, bucket, limits)


async def client_of(gateway: Any) -> httpx.AsyncClient:
    """A client with the admin key of a tenant that has the adapter `support`."""
    gateway.key = await gateway.tenant("boss", ("tenant:admin",))
    async with gateway.database.as_operator() as session:
        tenant = await TenantRepository(session).get("boss")
        await RegistryWriter(session, tenant.id).get_or_create("support")
    headers = {"authorization": f"Bearer {gateway.key}"}
    return httpx.AsyncClient(base_url=f"{gateway.url}/tenant/v1", headers=headers, timeout=120)


async def open_upload(http: httpx.AsyncClient) -> str:
    response = await http.post("adapters/support/uploads", json={"files": declared(FILES)})
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


async def put(http: httpx.AsyncClient, upload: str, number: int) -> httpx.Response:
    content = FILES[WEIGHTS][(number - 1) * PART_BYTES : number * PART_BYTES]
    return await http.put(f"uploads/{upload}/{WEIGHTS}/parts/{number}", content=content)


def outcome(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json().get("error", {}).get("code", "")


async def test_uploads_stop_at_the_floor_and_the_rest_goes_on(
    start_gateway: Any, database: Database, small_disk: Path
) -> None:
    home = home_of(database, small_disk, FLOOR_BYTES)
    gateway = await start_gateway(home=home)
    async with await client_of(gateway) as http:
        upload = await open_upload(http)
        responses = await asyncio.gather(*(put(http, upload, number) for number in range(1, PARTS + 1)))
        refused = [response for response in responses if response.status_code != 200]
        assert 0 < len(refused) < PARTS
        assert {outcome(response) for response in refused} == {(507, "storage_full")}
        assert all(response.headers["retry-after"] == "60" for response in refused)
        # Parts in flight write at most a mebibyte each after they saw the floor.
        assert free(small_disk) > FLOOR_BYTES - PARTS * MIB
        assert home.left() == []
        filler = small_disk / "of another program"
        filler.write_bytes(b"x" * max(0, free(small_disk) - FLOOR_BYTES + MIB))
        opened = await http.post("adapters/support/uploads", json={"files": declared(FILES)})
        parts = {name: ("x", content) for name, content in FILES.items()}
        whole = await http.post("adapters/support/versions", files=parts)
        one = await put(http, upload, 1)
        for response in (opened, whole, one):
            assert outcome(response) == (507, "storage_full")
        assert (await gateway.post("/v1/completions", COMPLETION)).status_code == 200
        for path in ("quotas", "adapters", "keys", f"uploads/{upload}"):
            assert (await http.get(path)).status_code == 200
        assert (await http.delete(f"uploads/{upload}")).status_code == 204
        filler.unlink()
        assert (await put(http, await open_upload(http), 1)).status_code == 200
        assert home.left() == []


async def test_a_disk_that_is_full_without_a_floor(
    start_gateway: Any, database: Database, small_disk: Path
) -> None:
    home = home_of(database, small_disk, 0)
    gateway = await start_gateway(home=home)
    async with await client_of(gateway) as http:
        upload = await open_upload(http)
        (small_disk / "of another program").write_bytes(b"x" * (free(small_disk) - PART_BYTES // 2))
        assert outcome(await put(http, upload, 1)) == (507, "storage_full")
        parts = {name: ("x", content) for name, content in FILES.items()}
        assert outcome(await http.post("adapters/support/versions", files=parts)) == (507, "storage_full")
        assert home.left() == [] and (await http.get("quotas")).status_code == 200


async def test_with_a_bucket_the_local_disk_still_counts(
    start_gateway: Any, database: Database, small_disk: Path, s3_bucket: S3Options
) -> None:
    home = home_of(database, small_disk, FLOOR_BYTES, s3_bucket)
    gateway = await start_gateway(home=home)
    async with await client_of(gateway) as http:
        upload = await open_upload(http)
        assert (await put(http, upload, 1)).status_code == 200
        (small_disk / "of another program").write_bytes(b"x" * (free(small_disk) - FLOOR_BYTES - MIB))
        assert outcome(await put(http, upload, 2)) == (507, "storage_full")
        assert home.left() == []


async def test_parts_that_cannot_be_assembled_stay(
    start_gateway: Any, database: Database, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FILES, WEIGHTS, FILES[WEIGHTS][: 2 * PART_BYTES])
    home = home_of(database, small_disk, FLOOR_BYTES)
    gateway = await start_gateway(home=home)
    async with await client_of(gateway) as http:
        upload = await open_upload(http)
        await http.put(f"uploads/{upload}/{CONFIG}/parts/1", content=FILES[CONFIG])
        for number in (1, 2):
            assert (await put(http, upload, number)).status_code == 200
        filler = small_disk / "of another program"
        filler.write_bytes(b"x" * (free(small_disk) - FLOOR_BYTES - PART_BYTES))
        assert outcome(await http.post(f"uploads/{upload}/complete")) == (507, "storage_full")
        assert home.left() == []
        filler.unlink()
        assert (await http.post(f"uploads/{upload}/complete")).status_code == 202
