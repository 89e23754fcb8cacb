"""Sessions: ended one by one and everywhere, switched between tenants, and of operators who look into one."""

from uuid import UUID, uuid4

import pytest
from tests.tenants.people.people_world import (
    ADDRESS,
    AGENT,
    acting,
    actions,
    add_person,
    cheap_passwords,
    signed_in,
)
from tests.tenants.registry_records import make_tenant
from tests.tenants.test_unit_of_work import Publisher

from loraplex.tenants.actors import system_actor
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import RevokedKey, ScopeNotHeld, TenantNotFound, UserNotFound
from loraplex.tenants.people import accounts, sessions
from loraplex.tenants.people.console_keys import issue_console_token
from loraplex.tenants.people.identity import ConsoleSession
from loraplex.tenants.people.roles import VIEWING_SCOPES, scopes_of
from loraplex.tenants.people.sessions import SignedIn, find_session
from loraplex.tenants.unit_of_work import UnitOfWork, unit_of_work

__all__ = ["cheap_passwords"]
pytestmark = pytest.mark.usefixtures("cheap_passwords")
MARA, EVE, OPERATOR = "mara@example.com", "eve@example.com", "op@example.com"


@pytest.fixture
async def acme(database: Database) -> UUID:
    return await make_tenant(database, "acme")


@pytest.fixture
async def rival(database: Database) -> UUID:
    return await make_tenant(database, "rival")


async def test_signing_out_ends_this_session_alone(database: Database, acme: UUID) -> None:
    await add_person(database, MARA, roles={acme: "admin"})
    first, second = await signed_in(database, MARA), await signed_in(database, MARA)
    async with acting(database, first.session) as uow:
        await sessions.end_session(uow, first.session)
    assert await find_session(database, first.token, "tenant") is None
    assert await find_session(database, second.token, "tenant") is not None
    assert await actions(database, acme) == ["session.end"]


async def test_signing_out_everywhere_crosses_tenants(database: Database, acme: UUID, rival: UUID) -> None:
    user_id = await add_person(database, MARA, roles={acme: "admin", rival: "viewer"}, operator=True)
    await add_person(database, EVE, roles={acme: "admin"})
    here, eve = await signed_in(database, MARA), await signed_in(database, EVE)
    area = await signed_in(database, MARA, area="operator")
    async with acting(database, (there := await signed_in(database, MARA)).session) as uow:
        moved = await sessions.switch_tenant(uow, there.session, rival)
    async with acting(database, here.session) as uow:
        assert await sessions.end_all_sessions(uow, user_id, but=here.session.id) == 2
    assert await find_session(database, here.token, "tenant") is not None
    assert await find_session(database, moved, "tenant") is None
    assert await find_session(database, area.token, "operator") is None
    assert await find_session(database, eve.token, "tenant") is not None


async def test_keys_of_the_console_end_on_the_gateways_of_every_tenant(
    database: Database, acme: UUID, rival: UUID
) -> None:
    user_id = await add_person(database, MARA, roles={acme: "developer", rival: "developer"})
    await add_person(database, EVE, roles={acme: "admin", rival: "admin"})

    async def everywhere(uow: UnitOfWork, session: ConsoleSession) -> None:
        await sessions.end_all_sessions(uow, user_id, but=session.id)

    async def disabled(uow: UnitOfWork, session: ConsoleSession) -> None:
        await accounts.disable_user(uow, MARA)

    for area, work in (("tenant", everywhere), ("operator", disabled)):
        opened, publisher = await signed_in(database, MARA), Publisher(database)
        for tenant_id in (acme, rival):
            async with acting(database, opened.session) as uow:
                token = await sessions.switch_tenant(uow, opened.session, tenant_id)
            found = await find_session(database, token, "tenant")
            assert found is not None
            opened = SignedIn(token, found)
            async with acting(database, found) as uow:
                await issue_console_token(uow, found, "inference")
        tenant = opened.session.tenant_id if area == "tenant" else None
        async with unit_of_work(database, system_actor("test"), tenant, publisher) as uow:
            await work(uow, opened.session)
        assert {acme, rival} == set(publisher.published)


async def test_own_sessions_are_listed_and_ended_those_of_others_are_not(
    database: Database, acme: UUID
) -> None:
    await add_person(database, MARA, roles={acme: "admin"})
    await add_person(database, EVE, roles={acme: "admin"})
    mine, other, eve = [await signed_in(database, each) for each in (MARA, MARA, EVE)]
    listed = await sessions.sessions_of_person(database, mine.session)
    assert {each.id for each in listed} == {mine.session.id, other.session.id}
    assert {(each.tenant_name, str(each.address), each.user_agent) for each in listed} == {
        ("acme", ADDRESS, AGENT)
    }
    async with acting(database, mine.session) as uow:
        await sessions.end_own_session(uow, mine.session, other.session.id)
    assert await find_session(database, other.token, "tenant") is None
    for foreign in (eve.session.id, uuid4()):
        with pytest.raises(UserNotFound):
            async with acting(database, mine.session) as uow:
                await sessions.end_own_session(uow, mine.session, foreign)
    assert await find_session(database, eve.token, "tenant") is not None


async def test_a_switch_replaces_token_and_rights(database: Database, acme: UUID, rival: UUID) -> None:
    await add_person(database, MARA, roles={acme: "admin", rival: "billing"})
    opened = await signed_in(database, MARA)
    async with acting(database, opened.session) as uow:
        token = await sessions.switch_tenant(uow, opened.session, rival)
    assert await find_session(database, opened.token, "tenant") is None
    found = await find_session(database, token, "tenant")
    assert found is not None and (found.tenant_id, found.role) == (rival, "billing")
    assert found.scopes == scopes_of("billing") and found.expires_at == opened.session.expires_at
    assert found.csrf_token != opened.session.csrf_token


async def test_no_switch_to_a_tenant_of_others(database: Database, acme: UUID, rival: UUID) -> None:
    await add_person(database, MARA, roles={acme: "admin"})
    opened = await signed_in(database, MARA)
    with pytest.raises(TenantNotFound):
        async with acting(database, opened.session) as uow:
            await sessions.switch_tenant(uow, opened.session, rival)
    assert await find_session(database, opened.token, "tenant") is not None


async def test_a_session_that_ended_meanwhile_is_not_switched(
    database: Database, acme: UUID, rival: UUID
) -> None:
    await add_person(database, MARA, roles={acme: "admin", rival: "admin"})
    opened = await signed_in(database, MARA)
    async with acting(database, opened.session) as uow:
        await sessions.end_session(uow, opened.session)
    with pytest.raises(UserNotFound):
        async with acting(database, opened.session) as uow:
            await sessions.switch_tenant(uow, opened.session, rival)


async def test_an_operator_looks_in_and_changes_nothing(database: Database, acme: UUID) -> None:
    await add_person(database, OPERATOR, operator=True)
    area = await signed_in(database, OPERATOR)
    async with acting(database, area.session) as uow:
        token = await sessions.view_as_operator(uow, area.session, acme)
    found = await find_session(database, token, "tenant")
    assert found is not None and found.viewing_as_operator
    assert (found.tenant_id, found.role, found.scopes) == (acme, None, VIEWING_SCOPES)
    assert all(scope.endswith(":read") for scope in found.scopes)
    assert await find_session(database, area.token, "operator") is not None
    assert await actions(database, acme) == ["tenant.view"]
    for scope in ("inference", "adapters:write"):
        with pytest.raises(ScopeNotHeld):
            async with acting(database, found) as uow:
                await issue_console_token(uow, found, scope)
    # Tenants see the addresses of people, and none of operators.
    assert found.actor(ADDRESS, None).kind == "operator"


async def test_a_console_token_is_a_key_that_ends_with_the_session(database: Database, acme: UUID) -> None:
    await add_person(database, MARA, roles={acme: "developer"})
    opened = await signed_in(database, MARA)
    async with acting(database, opened.session) as uow:
        token = await issue_console_token(uow, opened.session, "inference")
    async with database.as_writer() as session:
        key = await KeyRepository(session).authenticate(token.api_key)
    assert (key.tenant_id, key.scopes, key.expires_at) == (acme, ["inference"], token.expires_at)
    async with database.as_tenant(acme) as session:
        assert await KeyRepository(session).list(acme) == []
    assert token.api_key not in repr(token)
    async with acting(database, opened.session) as uow:
        await sessions.end_session(uow, opened.session)
    with pytest.raises(RevokedKey):
        async with database.as_writer() as session:
            await KeyRepository(session).authenticate(token.api_key)


async def test_a_role_without_the_scope_gets_no_token(database: Database, acme: UUID) -> None:
    await add_person(database, MARA, roles={acme: "viewer"})
    opened = await signed_in(database, MARA)
    with pytest.raises(ScopeNotHeld, match="inference"):
        async with acting(database, opened.session) as uow:
            await issue_console_token(uow, opened.session, "inference")
