"""A suite and a completed evaluation of an adapter's first version, as a gateway of the tests stores them."""

import json
from functools import partial
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import select
from tests.platform.web.gateway import SECRET

from loraplex.platform.server.secret import derive
from loraplex.tenants.database import Database
from loraplex.tenants.evaluations.encrypted_contents import EncryptedContents
from loraplex.tenants.ids import uuid7
from loraplex.tenants.models import Adapter, AliasGate, Evaluation, Suite


async def add_evaluation(
    database: Database, tenant_id: UUID, adapter: str, report: dict[str, Any] | None = None, **columns: Any
) -> UUID:
    """Add a suite of the adapter's name and an evaluation on it."""
    contents, suite_id, evaluation_id = EncryptedContents(partial(derive, SECRET)), uuid4(), uuid7()
    content = contents.encrypt(tenant_id, evaluation_id, json.dumps(report or {}).encode())
    async with database.as_operator() as session:
        owner = (Adapter.tenant_id == tenant_id, Adapter.name == adapter)
        adapter_id = (await session.scalars(select(Adapter.id).where(*owner))).one()
        suite = {"name": adapter, "sha256": "a" * 64, "cases": 1, "size_bytes": 2, "created_by": "key"}
        stored = contents.encrypt(tenant_id, suite_id, b"{}")
        session.add(Suite(id=suite_id, tenant_id=tenant_id, content=stored, **suite))
        await session.flush()
        values = {
            "version": 1,
            "baseline": None,
            "seed": 0,
            "state": "completed",
            "total": 1,
            "done": 1,
            "pass_rate": 1.0,
            "report": content,
            "report_sha256": "b" * 64,
            "key_id": "key",
            "created_by": "key",
            **columns,
        }
        ids = {"id": evaluation_id, "tenant_id": tenant_id, "adapter_id": adapter_id, "suite_id": suite_id}
        session.add(Evaluation(**ids, suite=adapter, suite_sha256="a" * 64, **values))
    return evaluation_id


async def add_gate(database: Database, tenant_id: UUID, adapter: str) -> None:
    """Add a gate to the alias `production` of an adapter."""
    async with database.as_operator() as session:
        owner = (Adapter.tenant_id == tenant_id, Adapter.name == adapter)
        adapter_id = (await session.scalars(select(Adapter.id).where(*owner))).one()
        suite = {"suite": "conformance", "suite_sha256": "a" * 64, "min_pass": 0.5, "changed_by": "key"}
        session.add(AliasGate(adapter_id=adapter_id, alias="production", tenant_id=tenant_id, **suite))


async def add_shared_suite(database: Database, name: str) -> None:
    """Add a suite of the installation."""
    async with database.as_operator() as session:
        fields = {"sha256": "a" * 64, "cases": 1, "size_bytes": 2, "content": b"", "created_by": "key"}
        session.add(Suite(name=name, **fields))
