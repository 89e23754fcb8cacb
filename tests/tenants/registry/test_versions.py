"""Which moves between states are made, each from the state that was seen, with an audit row; every other one is refused."""

import asyncio
from itertools import product
from uuid import UUID, uuid4

import pytest
import structlog
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from tests.tenants.registry_records import RegistryWriter

from loraplex.platform.server.components import report_other_fingerprints
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.actors import Actor
from loraplex.tenants.audit_log import AuditRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import AdapterNotFound, VersionNotFound, VersionStateChanged
from loraplex.tenants.models import VERSION_STATES, AdapterVersion, AuditEntry
from loraplex.tenants.registry.resolution import ModelResolver
from loraplex.tenants.registry.versions import (
    FINGERPRINT,
    TRANSITIONS,
    Findings,
    PendingVersion,
    PendingVersions,
    VersionStates,
    serving_by_fingerprint,
)

ACTOR = Actor("key", "abc123")
FINDINGS = Findings("d" * 64, 8, {"r": 8})


@pytest.fixture
async def tenant_id(database: Database) -> UUID:
    async with database.as_operator() as session:
        owner = await TenantRepository(session).create("acme")
        await RegistryWriter(session, owner.id).get_or_create("voice")
        return owner.id


async def create(database: Database, tenant_id: UUID, state: str = "validating") -> UUID:
    async with database.as_tenant(tenant_id) as session:
        states = VersionStates(session, tenant_id, AuditRepository(session, ACTOR, tenant_id))
        record = await states.create("voice", version_id=uuid4(), size_bytes=7, created_by="abc123")
        if state != "validating":
            record.digest, record.rank, record.config = FINDINGS.digest, FINDINGS.rank, FINDINGS.config
            record.state = state
        return record.id


async def move(
    database: Database,
    tenant_id: UUID,
    version_id: UUID,
    to: str,
    expected: tuple[str, ...] | None = None,
    findings: Findings | None = None,
) -> AdapterVersion:
    async with database.as_tenant(tenant_id) as session:
        states = VersionStates(session, tenant_id, AuditRepository(session, ACTOR, tenant_id))
        if findings is not None:
            await states.note(version_id, findings, {"checks": [1]})
        return await states.move(version_id, to, expected=expected, reason="a reason")


async def test_serving_versions_are_counted_by_the_engines_that_probed_them(
    database: Database, tenant_id: UUID
) -> None:
    async def validated(fingerprint: str | None, state: str = "ready") -> None:
        version_id = await create(database, tenant_id)
        async with database.as_tenant(tenant_id) as session:
            states = VersionStates(session, tenant_id, AuditRepository(session, ACTOR, tenant_id))
            named = {} if fingerprint is None else {FINGERPRINT: fingerprint}
            await states.note(version_id, FINDINGS, {"checks": [], **named})
            await states.move(version_id, state)

    old, new = f"fp_{uuid4().hex}", f"fp_{uuid4().hex}"
    for fingerprint, state in (
        (old, "ready"),
        (old, "ready"),
        (new, "ready"),
        (None, "ready"),
        (old, "rejected"),
    ):
        await validated(fingerprint, state)
    async with database.as_operator() as session:
        counted = await serving_by_fingerprint(session)
    assert (counted[old], counted[new], None in counted) == (2, 1, False)
    with structlog.testing.capture_logs() as logs:
        await report_other_fingerprints(database, new)
    told = {each["validated_under"]: each["adapter_versions"] for each in logs}
    assert told[old] == 2 and new not in told


async def entries(database: Database, tenant_id: UUID) -> list[tuple[str, str, object, object]]:
    async with database.as_tenant(tenant_id) as session:
        found = await session.scalars(select(AuditEntry).order_by(AuditEntry.id))
        return [(entry.action, entry.target, entry.before, entry.after) for entry in found]


def test_the_table_knows_every_state_and_nothing_leaves_the_last() -> None:
    assert TRANSITIONS.keys() == set(VERSION_STATES)
    assert set().union(*TRANSITIONS.values()) <= set(VERSION_STATES)
    assert TRANSITIONS["deleting"] == frozenset()
    assert all("deleting" in targets for state, targets in TRANSITIONS.items() if state != "deleting")


async def test_a_version_becomes_ready_and_serves(database: Database, tenant_id: UUID) -> None:
    version_id = await create(database, tenant_id)
    moved = await move(database, tenant_id, version_id, "ready", ("validating",), FINDINGS)
    assert (moved.state, moved.digest, moved.rank, moved.config) == ("ready", "d" * 64, 8, {"r": 8})
    assert (moved.report, moved.version, moved.created_by, moved.revision) == (
        {"checks": [1]},
        1,
        "abc123",
        3,
    )
    async with database.as_operator() as session:
        assert await ModelResolver(session, tenant_id).resolve("voice@1") is not None
    await move(database, tenant_id, version_id, "quarantined")
    async with database.as_operator() as session:
        assert await ModelResolver(session, tenant_id).resolve("voice@1") is None
    await move(database, tenant_id, version_id, "ready", ("quarantined",))
    assert await entries(database, tenant_id) == [
        ("version.create", "adapters/voice/versions/1", None, {"state": "validating", "size_bytes": 7}),
        (
            "version.accept",
            "adapters/voice/versions/1",
            {"state": "validating"},
            {"state": "ready", "reason": "a reason", "digest": "d" * 64},
        ),
        (
            "version.quarantine",
            "adapters/voice/versions/1",
            {"state": "ready"},
            {"state": "quarantined", "reason": "a reason"},
        ),
        (
            "version.release",
            "adapters/voice/versions/1",
            {"state": "quarantined"},
            {"state": "ready", "reason": "a reason", "digest": "d" * 64},
        ),
    ]


async def test_exactly_the_drawn_moves_are_made(database: Database, tenant_id: UUID) -> None:
    for before, to in product(VERSION_STATES, VERSION_STATES):
        version_id = await create(database, tenant_id, before)
        known = len(await entries(database, tenant_id))
        if to in TRANSITIONS[before]:
            findings = FINDINGS if before == "validating" and to == "ready" else None
            assert (await move(database, tenant_id, version_id, to, findings=findings)).state == to
            assert len(await entries(database, tenant_id)) == known + 1
        else:
            with pytest.raises(VersionStateChanged, match=f"is {before}, from where it does not become {to}"):
                await move(database, tenant_id, version_id, to)
            assert len(await entries(database, tenant_id)) == known


async def test_of_two_who_saw_one_state_one_moves_it(database: Database, tenant_id: UUID) -> None:
    version_id = await create(database, tenant_id)
    results = await asyncio.gather(
        move(database, tenant_id, version_id, "ready", ("validating",), FINDINGS),
        *(move(database, tenant_id, version_id, "rejected", ("validating",)) for _ in range(4)),
        return_exceptions=True,
    )
    assert sum(isinstance(result, AdapterVersion) for result in results) == 1
    assert sum(isinstance(result, VersionStateChanged) for result in results) == 4
    with pytest.raises(VersionStateChanged):
        await move(database, tenant_id, version_id, "deleting", ("validating",))


async def test_what_was_found_is_never_replaced(database: Database, tenant_id: UUID) -> None:
    version_id = await create(database, tenant_id)
    async with database.as_tenant(tenant_id) as session:
        states = VersionStates(session, tenant_id, AuditRepository(session, ACTOR, tenant_id))
        noted = await states.note(version_id, FINDINGS, {"checks": []})
        assert (noted.state, noted.digest) == ("validating", FINDINGS.digest)
    with pytest.raises(IntegrityError):
        await move(database, tenant_id, version_id, "ready", findings=Findings("e" * 64, 8, {}))
    await move(database, tenant_id, version_id, "ready", findings=FINDINGS)
    with pytest.raises(VersionStateChanged, match="is ready, not validating"):
        await move(database, tenant_id, version_id, "ready", findings=FINDINGS)


async def test_a_ready_version_has_findings(database: Database, tenant_id: UUID) -> None:
    version_id = await create(database, tenant_id)
    with pytest.raises(IntegrityError):
        await move(database, tenant_id, version_id, "ready")


async def test_another_tenants_version_does_not_exist(database: Database, tenant_id: UUID) -> None:
    version_id = await create(database, tenant_id)
    async with database.as_operator() as session:
        other = (await TenantRepository(session).create("bolt")).id
    with pytest.raises(VersionNotFound):
        await move(database, other, version_id, "rejected")
    async with database.as_tenant(other) as session:
        states = VersionStates(session, other, AuditRepository(session, ACTOR, other))
        with pytest.raises(AdapterNotFound):
            await states.create("voice", version_id=uuid4(), size_bytes=1, created_by=None)


async def test_versions_that_wait_are_found_by_age(database: Database, tenant_id: UUID) -> None:
    old, new = [await create(database, tenant_id) for _ in range(2)]
    await create(database, tenant_id, "ready")
    async with database.as_operator() as session:
        waiting = PendingVersions(session)
        assert await waiting.get(new) == PendingVersion(tenant_id, new)
        assert await waiting.get(uuid4()) is None
        assert {each.version_id for each in await waiting.older_than(-1)} == {old, new}
        assert await waiting.older_than(60) == []
