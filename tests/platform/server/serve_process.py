"""`loraplex serve` as a process with the scripted engine, and what tests ask of its processes and stores."""

import asyncio
import os
import re
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.engine.fake_engine import DEFAULT_INFO, FakeScript
from loraplex.platform.processes.child_process import python_command
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.scopes import INFERENCE, OPERATOR

RUN = "from loraplex.platform.cli.main import main; main()"
START_S = 180.0


def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition was not true in time"
        time.sleep(0.05)


class Serve:
    """A running `loraplex serve`."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.url = ""

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.search(r"https?://[^/]+", line)
        assert match, f"{line!r}: {(self.folder / 'stderr').read_text()}"
        self.url = match[0]
        # At once, without a second try. Its certificate, if it has one, is of a test.
        assert httpx.get(f"{self.url}/livez", verify=False, timeout=START_S).status_code == 200


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, chat_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    chat_tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def serving(
    folder: Path,
    model: Path | None,
    script: FakeScript,
    *arguments: str,
    wait: bool = True,
    settings: Mapping[str, str] | None = None,
) -> Iterator[Serve]:
    folder.mkdir(exist_ok=True)
    (folder / "script.json").write_bytes(msgspec.json.encode(script))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LORAPLEX_")}
    given = {"drain_grace_s": "0", **(settings or {})}
    environment |= {f"LORAPLEX_{key.upper()}": value for key, value in given.items()}
    environment["LORAPLEX_FAKE_ENGINE"] = str(folder / "script.json")
    options = ["--port", "0", "--data-dir", str(folder / "data")]
    options += ["--model", str(model)] if model is not None else []
    command = python_command("-c", RUN, "serve", *options, *arguments)
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    serve = Serve(process, folder)
    try:
        if wait:
            serve.wait_ready()
        yield serve
    finally:
        process.kill()
        process.wait()


def script(**changes: Any) -> FakeScript:
    info = msgspec.structs.replace(DEFAULT_INFO, vocab_size=400)
    return FakeScript(info=info, **changes)


def make_key(database_url: str, name: str = "acme", scopes: Sequence[str] = (INFERENCE,)) -> str:
    """A tenant and its key, in the database that the server uses."""

    async def make(session: AsyncSession) -> str:
        tenant = await TenantRepository(session).create(name)
        return (await KeyRepository(session).create(tenant.id, "test", scopes)).plaintext

    return in_database(database_url, make)


def make_operator_key(database_url: str) -> str:
    async def make(session: AsyncSession) -> str:
        return (await KeyRepository(session).create(None, "test", [OPERATOR])).plaintext

    return in_database(database_url, make)


def in_database(database_url: str, work: Callable[[AsyncSession], Awaitable[str]]) -> str:
    async def run() -> str:
        database = Database(database_url)
        async with database.as_operator() as session:
            result = await work(session)
        await database.close()
        return result

    return asyncio.run(run())


@pytest.fixture
def stores(database_url: str, valkey_url: str) -> dict[str, str]:
    """Addresses of running stores, as in production."""
    return {"database_url": database_url, "redis_url": valkey_url}
