"""A suite and a completed evaluation of an adapter's first version, as a gateway of the tests stores them."""

from functools import partial
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import select
from tests.platform.web.gateway import SECRET

from loraplex.platform.evaluations.answers import Answer, Call
from loraplex.platform.evaluations.report import (
    Comparison,
    EvaluatedModel,
    Figures,
    Report,
    ShownCase,
    report_bytes,
)
from loraplex.platform.server.secret import derive
from loraplex.tenants.database import Database
from loraplex.tenants.evaluations.encrypted_contents import EncryptedContents
from loraplex.tenants.ids import uuid7
from loraplex.tenants.models import Adapter, AliasGate, Evaluation, Suite


async def add_evaluation(
    database: Database,
    tenant_id: UUID,
    adapter: str,
    report: Report | None = None,
    suite: str | None = None,
    **columns: Any,
) -> UUID:
    """Add a suite, of the adapter's name unless `suite` gives another, and an evaluation on it."""
    suite = suite or adapter
    contents, suite_id, evaluation_id = EncryptedContents(partial(derive, SECRET)), uuid4(), uuid7()
    content = contents.encrypt(tenant_id, evaluation_id, report_bytes(report or stored_report()))
    async with database.as_operator() as session:
        owner = (Adapter.tenant_id == tenant_id, Adapter.name == adapter)
        adapter_id = (await session.scalars(select(Adapter.id).where(*owner))).one()
        fields = {"name": suite, "sha256": "a" * 64, "cases": 1, "size_bytes": 2, "created_by": "key"}
        stored = contents.encrypt(tenant_id, suite_id, b"{}")
        session.add(Suite(id=suite_id, tenant_id=tenant_id, content=stored, **fields))
        await session.flush()
        values = {
            "version": 1,
            "profile": {"tool_style": None, "reasoning_style": None, "defaults": {}},
            "baseline": None,
            "seed": 0,
            "state": "completed",
            "total": 1,
            "done": 1,
            "pass_rate": 1.0,
            "latency": {"seconds": {"p50": 0.2, "p95": 0.4}, "baseline_seconds": {"p50": 0.1, "p95": 0.2}},
            "report": content,
            "report_sha256": "b" * 64,
            "key_id": "key",
            "created_by": "key",
            **columns,
        }
        ids = {"id": evaluation_id, "tenant_id": tenant_id, "adapter_id": adapter_id, "suite_id": suite_id}
        session.add(Evaluation(**ids, suite=suite, suite_sha256="a" * 64, **values))
    return evaluation_id


def stored_report(cases: int = 1, text: str = "I am a ship", name: str = "case") -> Report:
    """A report on a version that fails cases that its baseline passes, and answers `text`."""
    figures = Figures(0, 0.0, (0.0, 0.8), {"regex": cases}, 20 * cases, 3 * cases)
    answer = Answer(text, (Call(text, text),), "stop", failed=("regex",))
    shown = [ShownCase(f"{name}-{number}", answer, Answer("Pier 7")) for number in range(cases)]
    return Report(
        suite_sha256="a" * 64,
        seed=0,
        total=cases,
        model=EvaluatedModel("pirate@2", "c" * 64, "fingerprint"),
        figures=figures,
        baseline=EvaluatedModel("pirate@1"),
        baseline_figures=Figures(cases, 1.0, (0.2, 1.0), {}, 20 * cases, 2 * cases),
        comparison=Comparison(cases, 0, 0.125),
        cases=shown,
    )


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
