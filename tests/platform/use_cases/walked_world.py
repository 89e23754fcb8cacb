"""An installation for the walk over all use cases: a gateway's application in this process, the command line, and real stores.

It begins with the tenant `harbor`, its key `ci`, and an operator's key; `begin` puts it back to that.
"""

import asyncio
import json
import os
import pwd
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias
from uuid import UUID, uuid4

import httpx
import psycopg
import redis
from fastapi import FastAPI
from psycopg import sql
from psycopg.rows import tuple_row
from tests.conftest import EMPTY
from tests.platform.web.upload_server import UploadHome
from tests.tenants.admission.memory_journal import MemoryJournal
from tests.tenants.billing.fixed_prices import fixed_prices
from typer.testing import CliRunner

from loraplex.adapters.uploads.service import Uploads
from loraplex.adapters.versions.lifecycle import VersionLifecycle
from loraplex.engine.fake_engine import FakeEngine
from loraplex.platform.cli.main import main
from loraplex.platform.evaluations.suite import SuiteSummary, check_suite
from loraplex.platform.inference.dependencies import GatewayDependencies, ServingConfig
from loraplex.platform.web.app import create_app
from loraplex.tenants.actors import system_actor
from loraplex.tenants.administration import tenants
from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.api_keys import use_cases as api_keys
from loraplex.tenants.api_keys.use_cases import Operator
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.database import Database
from loraplex.tenants.unit_of_work import unit_of_work
from loraplex.tenants.valkey import open_valkey

NO_ID: Final = "00000000-0000-4000-8000-000000000000"
# What differs from one installation to the next.
_TIME: Final = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)"
_UUID: Final = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
# The author is compared on its own, see `World.authors`.
_AUTHOR: Final = frozenset({"actor_kind", "actor", "address", "request_id", "invited_by"})
Dump: TypeAlias = Mapping[str, Sequence[Mapping[str, Any]]]
"""Table -> its rows."""


@dataclass(frozen=True)
class Outcome:
    """The result of one way to a use case; `detail` is the response or the output."""

    accepted: bool
    detail: str
    document: Any = None
    etag: str = ""


@dataclass
class World:
    """`tenant_id`, `key_id` (of the key `ci`) and the two credentials are those of the last `begin`."""

    database_url: str
    valkey_url: str
    database: Database
    client: httpx.AsyncClient
    app: FastAPI
    tenant_id: UUID = field(init=False)
    key_id: str = ""
    admin_key: str = field(default="", repr=False)
    operator_key: str = field(default="", repr=False)

    async def begin(self) -> None:
        """Empty both stores and create what every walk begins with."""
        with redis.Redis.from_url(self.valkey_url) as client:
            client.flushall()
        with psycopg.connect(self.database_url) as connection:
            connection.execute(EMPTY)
            for table in ("rate_cards", "credit_entries"):
                restart = sql.SQL("ALTER TABLE {} ALTER COLUMN id RESTART")
                connection.execute(restart.format(sql.Identifier(table)))
        async with unit_of_work(self.database, system_actor("walk"), None, None) as uow:
            created = await tenants.create(uow, "harbor")
            ci = await api_keys.create(uow, Operator(created.id), "ci", ["inference"])
            operator = await api_keys.create(uow, Operator(None), "op", ["operator"])
        self.tenant_id, self.key_id = created.id, ci.id
        self.admin_key, self.operator_key = created.api_key, operator.api_key

    async def tenant(self, method: str, path: str, body: Any = None, **headers: str) -> Outcome:
        """Send a request to `/tenant/v1` with the tenant's first key. `if_match="1"` sends `If-Match: "1"`."""
        return await self._send(self.admin_key, method, f"/tenant/v1{path}", body, headers)

    async def operator(self, method: str, path: str, body: Any = None, **headers: str) -> Outcome:
        """Send a request to `/operator/v1` with the operator's key."""
        return await self._send(self.operator_key, method, f"/operator/v1{path}", body, headers)

    async def command(self, *arguments: str, stdin: str | None = None) -> Outcome:
        """Run `loraplex` with these arguments."""
        result = await asyncio.to_thread(CliRunner().invoke, main, arguments, input=stdin)
        return Outcome(result.exit_code == 0, result.output)

    async def _send(self, key: str, method: str, path: str, body: Any, headers: Mapping[str, str]) -> Outcome:
        given = {
            name.replace("_", "-"): value if value == "*" else f'"{value}"' for name, value in headers.items()
        }
        given["authorization"] = f"Bearer {key}"
        response = await self.client.request(method, path, json=body, headers=given)
        assert response.status_code < 500, response.text
        document = response.json() if response.content else None
        return Outcome(
            response.is_success,
            f"{response.status_code} {response.text}",
            document,
            response.headers.get("etag", ""),
        )

    def dump(self) -> Dump:
        """Return all rows of all tables, without digests of secrets, and without fences, which change nothing."""
        with psycopg.connect(self.database_url, row_factory=tuple_row) as connection:
            tables = connection.execute(
                "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename NOT IN ('alembic_version', 'admission_epochs')"
            ).fetchall()
            return {
                name: [
                    row
                    for (row,) in connection.execute(
                        sql.SQL(
                            "SELECT to_jsonb(t) - '{{secret_sha256,token_sha256}}'::text[] FROM {} AS t"
                        ).format(sql.Identifier(name))
                    )
                ]
                for (name,) in sorted(tables)
            }

    async def published(self) -> Mapping[str, tuple[int, int]]:
        """Return each tenant's policy epoch in the database and the newest one that gateways were notified of, by name."""
        client, epochs = open_valkey(self.valkey_url), {}
        for row in self.dump()["tenants"]:
            newest = await Counters(client).publish_policy(UUID(row["id"]), 0)
            epochs[str(row["name"])] = int(row["policy_epoch"]), newest
        await client.aclose()
        return epochs


def entries_since(before: Dump, after: Dump) -> list[Mapping[str, Any]]:
    """Return the audit entries that only `after` has, oldest first."""
    old = {row["id"] for row in before["audit_entries"]}
    return sorted(
        (row for row in after["audit_entries"] if row["id"] not in old), key=lambda row: str(row["id"])
    )


def author_of(entry: Mapping[str, Any]) -> tuple[str, str, bool]:
    """Return kind and name of an entry's author, and whether it came with a request."""
    return entry["actor_kind"], entry["actor"], entry["request_id"] is not None


def command_author() -> tuple[str, str, bool]:
    """Return the author that entries of commands must have."""
    return "command", pwd.getpwuid(os.getuid()).pw_name, False


def comparable(dump: Dump) -> Mapping[str, Sequence[str]]:
    """Return the rows with ids numbered in the order of their rows, all times alike, and without authors.

    Rows that are alike are in the order of their times: PostgreSQL returns rows as it found room for them.
    """
    keys = [re.escape(row["key_id"]) for row in dump["api_keys"]]
    ids, labels = re.compile("|".join([_UUID, *keys])), dict[str, str]()

    def label(match: re.Match[str]) -> str:
        return labels.setdefault(match[0], f"id {len(labels)}")

    def shape(row: str) -> tuple[str, list[str]]:
        return ids.sub("id", re.sub(_TIME, "time", row)), re.findall(_TIME, row)

    texts = {
        table: [json.dumps(_anonymous(row), sort_keys=True) for row in rows] for table, rows in dump.items()
    }
    return {
        table: [ids.sub(label, re.sub(_TIME, "time", row)) for row in sorted(rows, key=shape)]
        for table, rows in texts.items()
    }


def _anonymous(value: Any) -> Any:
    if isinstance(value, list):
        return [_anonymous(each) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {name: _anonymous(each) for name, each in value.items() if name not in _AUTHOR}
    if kept.get("created_by") is not None:
        kept["created_by"] = "author"
    # Only a key is a parent, not an operator.
    kept.pop("parent_id", None)
    return kept


@asynccontextmanager
async def open_world(
    database_url: str, valkey_url: str, folder: Path, lifecycle: VersionLifecycle | None = None
) -> AsyncIterator[World]:
    """Open the stores and the application. Commands find both stores in the environment.

    `lifecycle` None: versions stay as they are registered.
    """
    database, valkey = Database(database_url, pool_size=3), open_valkey(valkey_url)
    admissions = QuotaAdmissionController(
        database,
        valkey,
        fixed_prices(Price()),
        uuid4(),
        AdmissionConfig(),
        journal=MemoryJournal(),
    )
    home = UploadHome(database, folder)
    uploads = home.uploads
    if lifecycle is not None:
        uploads = Uploads(database, home.parts, home.storage, lifecycle, home.limits)
    app = create_app(_dependencies(database, admissions, uploads))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield World(database_url, valkey_url, database, client, app)
    await valkey.aclose()
    await database.close()


async def _check_here(namespace: bytes, content: bytes) -> SuiteSummary:
    return check_suite(content)


def _dependencies(
    database: Database, admissions: QuotaAdmissionController, uploads: Uploads
) -> GatewayDependencies:
    """Return dependencies of an application that serves no inference."""
    absent: Any = SimpleNamespace(special_tokens=frozenset(), continuation_ids=None)
    unused: Callable[..., Awaitable[str]] = absent
    return GatewayDependencies(
        served_model_name="demo/base",
        database=database,
        engine=FakeEngine(),
        prompts=absent,
        token_text=absent,
        recorder=absent,
        request_analysis=absent,
        compile_checks=absent,
        value_validation=absent,
        suite_checks=SimpleNamespace(check=_check_here),  # type: ignore[arg-type]
        admission_controller=admissions,
        policy_publisher=admissions,
        namespace_of=lambda tenant_id: tenant_id.bytes * 2,
        derive_key=lambda *parts: bytes(32),
        uploads=uploads,
        adapter_path=unused,
        config=ServingConfig(key_cache_s=0.0),
    )
