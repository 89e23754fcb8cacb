"""A server process whose memory is watched during a large upload, and whose client is killed half way."""

import asyncio
import hashlib
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO

import httpx
import pytest
from tests.platform.web.upload_server import CONFIG, WEIGHTS
from tests.tenants.registry_records import RegistryWriter

from loraplex.adapters.versions.pending_folders import PENDING_FOLDER
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database

ROOT = Path(__file__).parents[4]
MIB = 1 << 20
PART_BYTES = 4 * MIB
MAX_GROWTH = 32 * MIB
PROGRAM = "from tests.platform.web.adapters.upload_program import {0}; {0}()"


@pytest.fixture
def weights(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A large file whose parts all differ."""
    path, piece = tmp_path / "weights", os.urandom(MIB)
    with path.open("wb") as file:
        for number in range(300 if request.config.getoption("--large-uploads") else 48):
            file.write(number.to_bytes(4) + piece[4:])
    return path


def program(name: str, *arguments: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / '.src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", PROGRAM.format(name), *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


@contextmanager
def running(name: str, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    process = program(name, *arguments)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return (await asyncio.to_thread(process.stdout.readline)).strip()


async def key_of(database: Database) -> str:
    async with database.as_operator() as session:
        tenant = await TenantRepository(session).create("acme")
        await RegistryWriter(session, tenant.id).get_or_create("support")
        return (await KeyRepository(session).create(tenant.id, "key", ("adapters:write",))).plaintext


@asynccontextmanager
async def watched(process: "subprocess.Popen[str]") -> AsyncIterator[None]:
    """Fails when the process grows by more than `MAX_GROWTH` meanwhile."""
    before = highest = resident(process)

    async def watch() -> None:
        nonlocal highest
        while True:
            highest = max(highest, resident(process))
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    yield
    watching.cancel()
    print(f"grew by {(highest - before) / MIB:.1f} MiB")
    assert highest - before < MAX_GROWTH


def resident(process: "subprocess.Popen[str]") -> int:
    """In bytes."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def newest(home: Path) -> str:
    """The hash of the weights that the life cycle took over last."""
    taken = (home / "home" / "adapters" / PENDING_FOLDER).glob(f"*/{WEIGHTS}")
    return hash_of(max(taken, key=lambda path: path.stat().st_mtime))


async def test_an_upload_goes_on_after_its_client_was_killed_and_memory_stays_flat(
    database: Database, tmp_path: Path, weights: Path
) -> None:
    key, config = await key_of(database), b'{"r": 8}'
    with running("serve", database.url, str(tmp_path / "home"), str(PART_BYTES)) as server:
        url = f"http://127.0.0.1:{await line(server)}/tenant/v1"
        async with httpx.AsyncClient(
            base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=120
        ) as http:
            small = {name: ("x", b"x" * MIB if name == WEIGHTS else config) for name in (CONFIG, WEIGHTS)}
            assert (await http.post("/adapters/support/versions", files=small)).status_code == 202
            files = [
                {"name": CONFIG, "size": len(config), "sha256": hashlib.sha256(config).hexdigest()},
                {"name": WEIGHTS, "size": weights.stat().st_size, "sha256": hash_of(weights)},
            ]
            async with watched(server):
                upload = (await http.post("/adapters/support/uploads", json={"files": files})).json()["id"]
                with running("send", url, key, upload, str(weights), str(PART_BYTES)) as client:
                    while int(await line(client)) < 3:
                        pass
                shown = (await http.get(f"/uploads/{upload}")).json()
                received = {part["number"] for part in shown["received"]}
                count = next(file["parts"] for file in shown["files"] if file["name"] == WEIGHTS)
                assert {1, 2, 3} <= received < {*range(1, count + 1)}
                with weights.open("rb") as content:
                    for number in {*range(1, count + 1)} - received:
                        content.seek((number - 1) * PART_BYTES)
                        part = content.read(PART_BYTES)
                        path = f"/uploads/{upload}/{WEIGHTS}/parts/{number}"
                        assert (await http.put(path, content=part)).status_code == 200
                await http.put(f"/uploads/{upload}/{CONFIG}/parts/1", content=config)
                done = await http.post(f"/uploads/{upload}/complete")
                assert (done.status_code, done.json()["version"]) == (202, 2)
            assert newest(tmp_path) == files[1]["sha256"]

            async with watched(server):
                with weights.open("rb") as content:
                    whole: dict[str, tuple[str, IO[bytes] | bytes]] = {
                        CONFIG: ("x", config),
                        WEIGHTS: ("x", content),
                    }
                    response = await asyncio.to_thread(
                        httpx.post,
                        f"{url}/adapters/support/versions",
                        files=whole,
                        headers={"authorization": f"Bearer {key}"},
                        timeout=60,
                    )
            assert response.status_code == 202
            assert newest(tmp_path) == files[1]["sha256"]
