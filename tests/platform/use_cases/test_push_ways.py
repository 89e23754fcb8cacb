"""A folder becomes a version by an upload, by `adapter push` next to a running server, and by `adapter push --url`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

import pytest
from tests.adapters.validation.good_folder import CONFIG, MODEL, WEIGHTS, write_good
from tests.adapters.versions.lifecycle_server import BAD_PROBE, BASE_DIGEST, QUICK, Server
from tests.platform.use_cases.walked_world import (
    Dump,
    Outcome,
    World,
    author_of,
    command_author,
    comparable,
    entries_since,
    open_world,
)
from tests.platform.web.gateway import served

from loraplex.adapters.target_modules import BaseModel, adaptable_modules
from loraplex.adapters.validation.own_files import OwnFilesValidation
from loraplex.adapters.versions.pending_folders import PendingFolders
from loraplex.engine.fake_engine import FakeScript
from loraplex.platform.server.base_model_file import BaseModelFacts, write_base_model
from loraplex.tenants.database import Database
from loraplex.tenants.ledger.journal.folder import JOURNAL_FOLDER

OF_UPLOADS: Final = ("uploads", "upload_parts", "idempotency_records")
"""Tables of the way that a folder takes, not of what it becomes."""


@dataclass
class Installation:
    """A gateway with its version lifecycle; `server.engine` probes."""

    world: World
    server: Server
    folder: Path

    async def upload(self) -> Outcome:
        """Create the adapter, upload it in one piece, wait, and move `production`."""
        world, name = self.world, "/adapters/voice"
        await world.tenant("POST", "/adapters", {"name": "voice"})
        files = {file: (self.folder / file).read_bytes() for file in (CONFIG, WEIGHTS)}
        headers = {"authorization": f"Bearer {world.admin_key}"}
        sent = await world.client.post(f"/tenant/v1{name}/versions", files=files, headers=headers)
        assert sent.status_code == 202, sent.text
        await self.server.lifecycle.settled()
        return await world.tenant("PUT", f"{name}/aliases/production", {"version": 1}, if_none_match="*")

    async def push(self, *options: str, stdin: str | None = None) -> Outcome:
        target = ("--name", "voice", "--tenant", "harbor")
        return await self.world.command("adapter", "push", str(self.folder), *target, *options, stdin=stdin)

    async def push_by_url(self) -> Outcome:
        async with served(self.world.app) as url:
            return await self.push("--url", url, "--key", "-", stdin=f"{self.world.admin_key}\n")


Way: TypeAlias = Callable[[Installation], Awaitable[Outcome]]


@pytest.fixture
async def installation(
    database_url: str, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Installation]:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("REDIS_URL", valkey_url)
    monkeypatch.setenv("LORAPLEX_DATA_DIR", str(tmp_path))
    (tmp_path / JOURNAL_FOLDER).mkdir()
    write_base_model(tmp_path, BaseModelFacts("demo/base", str(tmp_path), BASE_DIGEST))
    write_good(tmp_path / "voice")
    database, root = Database(database_url, pool_size=3), tmp_path / "adapters"
    validation = OwnFilesValidation(BaseModel(adaptable_modules(MODEL), BASE_DIGEST))
    server = Server(database, root, validation, replace(QUICK, resume_s=0.02))
    running = asyncio.create_task(server.lifecycle.run())
    async with asyncio.timeout(60):
        while not PendingFolders(root).is_watched():
            await asyncio.sleep(0.01)
    async with open_world(database_url, valkey_url, tmp_path, server.lifecycle) as world:
        yield Installation(world, server, tmp_path / "voice")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.lifecycle.close()
    await database.close()


async def walk(installation: Installation, way: Way) -> tuple[Outcome, Dump, Dump]:
    """Return the outcome and all rows before and after."""
    await installation.world.begin()
    before = installation.world.dump()
    outcome = await way(installation)
    return outcome, before, installation.world.dump()


def compared(dump: Dump, *without: str) -> Mapping[str, Sequence[str]]:
    """Without its other tables, whose ids would be counted."""
    return comparable({table: rows for table, rows in dump.items() if table not in {*OF_UPLOADS, *without}})


MADE: Final = ["adapter.create", "version.create", "version.accept", "alias.create"]
SYSTEM: Final = ("system", "validation", False)


async def test_a_command_leaves_the_version_of_an_upload(installation: Installation) -> None:
    uploaded, before, by_upload = await walk(installation, Installation.upload)
    assert uploaded.accepted, uploaded.detail
    assert [entry["action"] for entry in entries_since(before, by_upload)] == MADE
    pushed, before, by_command = await walk(installation, Installation.push)
    assert pushed.accepted and "probe" in pushed.detail, pushed.detail
    entries = entries_since(before, by_command)
    assert [author_of(entry) for entry in entries] == [
        *(command_author(), command_author(), SYSTEM, command_author())
    ]
    assert compared(by_command) == compared(by_upload)
    assert len(installation.server.engine.probed) == 2, "the probe ran for both"


async def test_a_push_to_a_url_leaves_the_version_of_an_upload(installation: Installation) -> None:
    _, _, by_upload = await walk(installation, Installation.upload)
    pushed, before, by_url = await walk(installation, Installation.push_by_url)
    assert pushed.accepted and "probe" in pushed.detail, pushed.detail
    entries = entries_since(before, by_url)
    assert [entry["action"] for entry in entries if entry["action"] != "upload.open"] == MADE
    assert {author_of(entry)[0] for entry in entries} == {"key", "system"}
    assert compared(by_url, "audit_entries") == compared(by_upload, "audit_entries")
    assert len(installation.server.engine.probed) == 2


async def test_the_probe_rejects_both_alike(installation: Installation) -> None:
    installation.server.engine.script = FakeScript(probe=BAD_PROBE)
    refused, before, by_upload = await walk(installation, Installation.upload)
    assert not refused.accepted and "rejected, not ready" in refused.detail
    actions = [entry["action"] for entry in entries_since(before, by_upload)]
    assert actions == ["adapter.create", "version.create", "version.reject"]
    for way in (Installation.push, Installation.push_by_url):
        refused, _, by_command = await walk(installation, way)
        assert not refused.accepted and "adapter_inexact: q_proj differs" in refused.detail
        versions = [compared(dump)["adapter_versions"] for dump in (by_command, by_upload)]
        assert versions[0] == versions[1]
    assert len(installation.server.engine.probed) == 3


async def test_a_refused_url_leaves_nothing(installation: Installation) -> None:
    async def other_tenant(each: Installation) -> Outcome:
        async with served(each.world.app) as url:
            target = ("--name", "voice", "--tenant", "nonesuch", "--url", url)
            return await each.world.command(
                "adapter", "push", str(each.folder), *target, "--key", each.world.admin_key
            )

    refused, before, after = await walk(installation, other_tenant)
    assert not refused.accepted and "the key belongs to the tenant harbor" in refused.detail
    assert after == before
