"""What a key may do with its tenant's keys: never more than it holds, and nothing once it has ended."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Literal
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from tests.tenants.registry_records import make_tenant

from loraplex.tenants.api_keys.delegation import KeyDelegation
from loraplex.tenants.api_keys.keys import IssuedKey, KeyRepository
from loraplex.tenants.api_keys.records import KeyChange
from loraplex.tenants.database import Database
from loraplex.tenants.errors import (
    BoundNotHeld,
    CountReached,
    ExpiredKey,
    InvalidScope,
    KeyEnded,
    KeyNotFound,
    RevokedKey,
    ScopeNotHeld,
)
from loraplex.tenants.models import LIMIT_COLUMNS, ApiKey, Quota
from loraplex.tenants.quotas.limits import COUNTED
from loraplex.tenants.scopes import INFERENCE, KEYS_WRITE, TENANT_SCOPES, effective_scopes

SCOPES = st.lists(st.sampled_from([*sorted(TENANT_SCOPES), "operator"]), min_size=1, max_size=3, unique=True)
NO_LIMITS: dict[str, int | None] = dict.fromkeys(LIMIT_COLUMNS)
Step = tuple[Literal["create", "change", "rotate"], int, int, list[str]]
STEPS = st.lists(
    st.tuples(st.sampled_from(["create", "change", "rotate"]), st.integers(0, 9), st.integers(0, 9), SCOPES),
    min_size=1,
    max_size=6,
)

NEW_TENANT = text(
    "INSERT INTO tenants (id, name) SELECT gen_random_uuid(), 't' || count(*) FROM tenants RETURNING id"
)


async def issue(database: Database, tenant_id: UUID, *scopes: str, environment: str = "live") -> ApiKey:
    async with database.as_operator() as session:
        return (await KeyRepository(session).create(tenant_id, "key", scopes, environment)).record


async def take(database: Database, tenant_id: UUID, keys: list[ApiKey], step: Step) -> ApiKey:
    """The key that one step made or changed."""
    kind, actor, target, scopes = step
    acting, aimed = keys[actor % len(keys)], keys[target % len(keys)]
    async with database.as_tenant(tenant_id) as session:
        managed = KeyDelegation(session, tenant_id, acting.id)
        if kind == "create":
            return (await managed.create("minted", scopes)).record
        if kind == "rotate":
            return (await managed.rotate(aimed.key_id, 60)).record
        seen = (await managed.locked(aimed.key_id)).revision
        return await managed.change(aimed.key_id, {"scopes": scopes}, seen)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(first=SCOPES.filter(lambda scopes: "operator" not in scopes), steps=STEPS, wide=SCOPES)
async def test_no_principal_mints_a_key_with_a_permission_it_lacks(
    database: Database, first: list[str], steps: list[Step], wide: list[str]
) -> None:
    async with database.as_operator() as session:
        tenant_id = (await session.execute(NEW_TENANT)).scalar_one()
    keys = [
        await issue(database, tenant_id, *first),
        await issue(database, tenant_id, *(TENANT_SCOPES & set(wide) or ["inference"])),
    ]
    in_grace = set[UUID]()
    for step in steps:
        actor = keys[step[1] % len(keys)]
        before = effective_scopes(actor.scopes)
        aimed = effective_scopes(keys[step[2] % len(keys)].scopes)
        wanted = effective_scopes(step[3]) if step[0] != "rotate" else aimed
        managed = frozenset[str]() if step[0] == "create" else aimed
        allowed = KEYS_WRITE in before and wanted <= before and managed <= before
        try:
            made = await take(database, tenant_id, keys, step)
        except BoundNotHeld as refused:
            assert actor.id in in_grace and refused.field == "expires_at"
            continue
        except ScopeNotHeld:
            assert not allowed
            continue
        except KeyEnded:
            continue
        assert allowed and effective_scopes(made.scopes) <= before
        assert step[0] == "change" or actor.id not in in_grace or made.expires_at is not None
        if step[0] == "rotate":
            in_grace.add(keys[step[2] % len(keys)].id)
        keys = [made if key.id == made.id else key for key in keys]
        if all(key.id != made.id for key in keys):
            keys.append(made)


async def test_a_new_key_is_its_managers(database: Database) -> None:
    tenant_id = await make_tenant(database)
    manager = await issue(database, tenant_id, "keys:write", "inference", environment="test")
    soon = datetime.now(UTC) + timedelta(days=1)
    async with database.as_tenant(tenant_id) as session:
        managed = KeyDelegation(session, tenant_id, manager.id)
        made = await managed.create(
            "new", ["inference"], {"expires_at": soon, "allowed_cidrs": ["10.0.0.0/8"]}
        )
        assert (made.record.environment, made.record.created_by) == ("test", manager.key_id)
        assert (made.record.expires_at, made.record.allowed_cidrs) == (soon, ["10.0.0.0/8"])
        assert made.plaintext.startswith("lpx_test_")
        with pytest.raises(InvalidScope, match="no scope of a tenant key"):
            await managed.create("new", ["root"])


async def test_wider_keys_are_out_of_reach_in_every_way(database: Database) -> None:
    tenant_id = await make_tenant(database)
    admin = await issue(database, tenant_id, "tenant:admin")
    manager = await issue(database, tenant_id, "keys:write", "inference")
    async with database.as_tenant(tenant_id) as session:
        managed = KeyDelegation(session, tenant_id, manager.id)
        for attempt in (
            managed.locked(admin.key_id),
            managed.rotate(admin.key_id, 0),
            managed.revoke(admin.key_id),
            managed.change(admin.key_id, {"name": "mine"}, admin.revision),
            managed.change(manager.key_id, {"scopes": ["tenant:admin"]}, manager.revision),
            managed.create("all but in name", sorted(TENANT_SCOPES)),
        ):
            with pytest.raises(ScopeNotHeld):
                await attempt
        assert (await managed.revoke(manager.key_id)).revoked_at is not None


async def bounded(database: Database, tenant_id: UUID, end: datetime | None, *networks: str) -> ApiKey:
    async with database.as_operator() as session:
        repository = KeyRepository(session)
        issued = await repository.create(
            tenant_id, "bounded", ["tenant:admin"], expires_at=end, allowed_cidrs=networks
        )
        return issued.record


SOON = (datetime.now(UTC) + timedelta(days=2)).replace(microsecond=0)
SOONER, LATER = SOON - timedelta(days=1), SOON + timedelta(seconds=1)
BEYOND: list[tuple[KeyChange, str]] = [
    ({"allowed_cidrs": []}, "allowed_cidrs"),
    ({"allowed_cidrs": ["10.0.0.0/7"]}, "allowed_cidrs"),
    ({"allowed_cidrs": ["10.1.0.0/16", "192.168.0.0/16"]}, "allowed_cidrs"),
    ({"allowed_cidrs": ["::/0"]}, "allowed_cidrs"),
    ({"expires_at": None}, "expires_at"),
    ({"expires_at": LATER}, "expires_at"),
    ({"expires_at": LATER, "allowed_cidrs": ["10.1.0.0/16"]}, "expires_at"),
]


@pytest.mark.parametrize(("change", "field"), BEYOND)
async def test_no_key_grants_networks_or_time_that_it_lacks(
    database: Database, change: KeyChange, field: str
) -> None:
    """Not to a new key, not to itself, and not to a sibling of its own bounds."""
    tenant_id = await make_tenant(database)
    manager = await bounded(database, tenant_id, SOON, "10.0.0.0/9", "10.128.0.0/9")
    sibling = await bounded(database, tenant_id, SOONER, "10.1.0.0/16")
    async with database.as_tenant(tenant_id) as session:
        managed = KeyDelegation(session, tenant_id, manager.id)
        for attempt in (
            managed.create("beyond", ["inference"], change),
            managed.change(manager.key_id, change, manager.revision),
            managed.change(sibling.key_id, change, sibling.revision),
        ):
            with pytest.raises(BoundNotHeld, match=field) as refused:
                await attempt
            assert refused.value.field == field
    async with database.as_operator() as session:
        assert len(await KeyRepository(session).list(tenant_id)) == 2


async def test_a_bounded_key_grants_what_it_has(database: Database) -> None:
    tenant_id = await make_tenant(database)
    manager = await bounded(database, tenant_id, SOON, "10.0.0.0/9", "10.128.0.0/9")
    async with database.as_tenant(tenant_id) as session:
        managed = KeyDelegation(session, tenant_id, manager.id)
        heir = (await managed.create("heir", ["inference"])).record
        assert (heir.expires_at, heir.allowed_cidrs) == (SOON, ["10.0.0.0/9", "10.128.0.0/9"])
        whole = await managed.create("whole", ["inference"], {"allowed_cidrs": ["10.0.0.0/8"]})
        assert (whole.record.expires_at, whole.record.allowed_cidrs) == (SOON, ["10.0.0.0/8"])
        brief = (await managed.create("brief", ["inference"], {"expires_at": SOONER})).record
        prolonged = await managed.change(brief.key_id, {"expires_at": SOON}, brief.revision)
        assert prolonged.expires_at == SOON
        rotated = (await managed.rotate(manager.key_id, 60)).record
        assert (rotated.expires_at, rotated.allowed_cidrs) == (SOON, ["10.0.0.0/9", "10.128.0.0/9"])


@pytest.mark.parametrize(
    ("end", "networks", "field"), [(None, ("10.1.0.0/16",), "expires_at"), (SOON, (), "allowed_cidrs")]
)
async def test_a_key_that_reaches_further_is_not_taken_over(
    database: Database, end: datetime | None, networks: tuple[str, ...], field: str
) -> None:
    """It may be narrowed and ended by a key of fewer networks or less time, but neither rotated nor given more."""
    tenant_id = await make_tenant(database)
    manager = await bounded(database, tenant_id, SOON, "10.0.0.0/8")
    further = await bounded(database, tenant_id, end, *networks)
    async with database.as_tenant(tenant_id) as session:
        managed = KeyDelegation(session, tenant_id, manager.id)
        narrowed = await managed.change(
            further.key_id, {"scopes": ["inference"], "name": "less"}, further.revision
        )
        for attempt in (
            managed.rotate(further.key_id, 0),
            managed.change(further.key_id, {"scopes": ["inference", "usage:read"]}, narrowed.revision),
        ):
            with pytest.raises(BoundNotHeld) as refused:
                await attempt
            assert refused.value.field == field
        assert (await managed.revoke(further.key_id)).revoked_at is not None


async def limited(database: Database, tenant_id: UUID, **limits: int | None) -> ApiKey:
    record = await issue(database, tenant_id, "tenant:admin")
    async with database.as_operator() as session:
        session.add(Quota(tenant_id=tenant_id, api_key_id=record.id, **limits))
    return record


async def test_a_key_gives_its_limits_to_every_key_it_mints(database: Database) -> None:
    tenant_id = await make_tenant(database)
    manager = await limited(database, tenant_id, requests_per_minute=5, budget_per_day=7)
    async with database.as_tenant(tenant_id) as session:
        keys, managed = KeyRepository(session), KeyDelegation(session, tenant_id, manager.id)
        child = (await managed.create("child", ["tenant:admin"])).record
        grandchild = (await KeyDelegation(session, tenant_id, child.id).create("g", ["inference"])).record
        for record in (manager, child, grandchild):
            limits = await keys.limits(record)
            assert (limits["requests_per_minute"], limits["budget_per_day"]) == (5, 7)


@pytest.mark.parametrize("name", COUNTED)
async def test_a_key_never_sets_a_limit_above_its_own(database: Database, name: str) -> None:
    tenant_id = await make_tenant(database)
    manager, free = (
        await limited(database, tenant_id, **{name: 5}),
        await issue(database, tenant_id, INFERENCE),
    )
    async with database.as_tenant(tenant_id) as session:
        managed = KeyDelegation(session, tenant_id, manager.id)
        for record in (manager, free):
            assert (await managed.limits_for(record.key_id, NO_LIMITS))[name] == 5
            assert (await managed.limits_for(record.key_id, {**NO_LIMITS, name: 4}))[name] == 4
            with pytest.raises(BoundNotHeld, match=f"{name} must be at most") as refused:
                await managed.limits_for(record.key_id, {**NO_LIMITS, name: 6})
            assert refused.value.field == name


async def test_a_key_without_limits_is_not_taken_over_by_one_that_has_some(database: Database) -> None:
    tenant_id = await make_tenant(database)
    manager, free = (
        await limited(database, tenant_id, tokens_per_day=5),
        await issue(database, tenant_id, INFERENCE),
    )
    equal = await limited(database, tenant_id, tokens_per_day=5, requests_per_minute=1)
    async with database.as_tenant(tenant_id) as session:
        managed = KeyDelegation(session, tenant_id, manager.id)
        for attempt in (
            managed.rotate(free.key_id, 0),
            managed.change(free.key_id, {"scopes": ["inference", "usage:read"]}, free.revision),
        ):
            with pytest.raises(BoundNotHeld, match="tokens_per_day"):
                await attempt
        heir = (await managed.rotate(equal.key_id, 0)).record
        assert (await KeyRepository(session).limits(heir))["requests_per_minute"] == 1
        assert (await managed.revoke(free.key_id)).revoked_at is not None


async def test_another_tenants_keys_do_not_exist(database: Database) -> None:
    mine, other = await make_tenant(database), await make_tenant(database, "other")
    manager, foreign = (
        await issue(database, mine, "tenant:admin"),
        await issue(database, other, "inference"),
    )
    async with database.as_tenant(mine) as session:
        managed = KeyDelegation(session, mine, manager.id)
        for key_id in (foreign.key_id, "x", "\x00" * 16):
            with pytest.raises(KeyNotFound):
                await managed.revoke(key_id)
    async with database.as_tenant(mine) as session:
        with pytest.raises(RevokedKey):
            await KeyDelegation(session, mine, foreign.id).create("stolen", ["inference"])


async def test_a_key_that_has_ended_manages_nothing(database: Database) -> None:
    tenant_id = await make_tenant(database)
    manager = await issue(database, tenant_id, "tenant:admin")
    async with database.as_operator() as session:
        await session.execute(text("UPDATE api_keys SET expires_at = now() - interval '1 second'"))
    async with database.as_tenant(tenant_id) as session:
        with pytest.raises(ExpiredKey):
            await KeyDelegation(session, tenant_id, manager.id).create("late", ["inference"])


async def test_a_key_revoked_while_it_mints_leaves_nothing_behind(database: Database) -> None:
    """Whatever the order, no key is minted after the revocation."""
    tenant_id = await make_tenant(database)
    manager = await issue(database, tenant_id, "tenant:admin")

    async def mint() -> IssuedKey:
        async with database.as_tenant(tenant_id) as session:
            return await KeyDelegation(session, tenant_id, manager.id).create("minted", ["inference"])

    async with database.as_operator() as session:
        await KeyRepository(session).revoke(tenant_id, manager.key_id)
        minting = asyncio.create_task(mint())
        await asyncio.sleep(0.2)
        assert not minting.done()
    with pytest.raises(RevokedKey):
        await minting


async def test_the_quota_binds_keys_too(database: Database) -> None:
    tenant_id = await make_tenant(database)
    manager = await issue(database, tenant_id, "tenant:admin")
    async with database.as_operator() as session:
        await session.execute(
            text("INSERT INTO quotas (id, tenant_id, max_keys) VALUES (gen_random_uuid(), :id, 1)"),
            {"id": tenant_id},
        )
    async with database.as_tenant(tenant_id) as session:
        managed = KeyDelegation(session, tenant_id, manager.id)
        with pytest.raises(CountReached):
            await managed.create("second", ["inference"])
        assert (await managed.rotate(manager.key_id, 60)).record.created_by == manager.key_id
