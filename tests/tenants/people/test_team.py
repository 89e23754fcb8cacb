"""The team of a tenant: invited by a link that works once, with roles whose changes apply at once, and always with an admin."""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text
from tests.tenants.people.people_world import (
    ADDRESS,
    AGENT,
    PASSWORD,
    acting,
    actions,
    add_person,
    cheap_passwords,
    derive_key,
    signed_in,
)
from tests.tenants.registry_records import make_tenant

from loraplex.tenants.actors import system_actor
from loraplex.tenants.administration.invitations import Acceptance, accept_invitation
from loraplex.tenants.database import Database
from loraplex.tenants.errors import (
    AlreadyMember,
    CountReached,
    InvalidField,
    InvitationPending,
    LastAdmin,
    LinkNotValid,
    ResetForbidden,
    RevisionMoved,
    SignInRefused,
    UserNotFound,
)
from loraplex.tenants.people import accounts, links, memberships, team
from loraplex.tenants.people.records import InvitationDocument
from loraplex.tenants.people.sessions import Client, SignedIn, find_session
from loraplex.tenants.people.sign_in import find_link
from loraplex.tenants.unit_of_work import unit_of_work

__all__ = ["cheap_passwords"]
pytestmark = pytest.mark.usefixtures("cheap_passwords")
MARA, EVE, NEW = "mara@example.com", "eve@example.com", "new@example.com"


@pytest.fixture
async def acme(database: Database) -> UUID:
    return await make_tenant(database, "acme")


@pytest.fixture
async def admin(database: Database, acme: UUID) -> SignedIn:
    await add_person(database, MARA, roles={acme: "admin"})
    return await signed_in(database, MARA)


async def invited(database: Database, admin: SignedIn, email: str, role: str) -> InvitationDocument:
    tenant_id = admin.session.tenant_id
    assert tenant_id is not None
    async with acting(database, admin.session) as uow:
        return await team.invite(uow, tenant_id, email, role)


async def accepted(
    database: Database, token: str, password: str = PASSWORD, now: datetime | None = None
) -> SignedIn:
    entered = Acceptance(name="New Person", password=password)
    client = Client(ADDRESS, AGENT)
    return await accept_invitation(database, token, entered, client, derive_key=derive_key, now=now)


async def listed(database: Database, tenant_id: UUID) -> list[tuple[str, str, str]]:
    async with database.as_tenant(tenant_id) as session:
        return [(each.email, each.role, each.state) for each in await team.members(session, tenant_id)]


async def test_a_new_person_accepts_once(database: Database, acme: UUID, admin: SignedIn) -> None:
    invitation = await invited(database, admin, " New@Example.com", "developer")
    assert (invitation.email, invitation.state) == (NEW, "invited")
    assert invitation.token not in repr(invitation)
    link = await find_link(database, invitation.token)
    assert (link.purpose, link.email, link.tenant_name, link.role) == ("member", NEW, "acme", "developer")
    assert link.user_id is None
    assert await listed(database, acme) == [(MARA, "admin", "active"), (NEW, "developer", "invited")]
    opened = await accepted(database, invitation.token)
    assert (opened.session.email, opened.session.role) == (NEW, "developer")
    assert await listed(database, acme) == [(MARA, "admin", "active"), (NEW, "developer", "active")]
    with pytest.raises(LinkNotValid):
        await accepted(database, invitation.token)
    assert await actions(database, acme) == ["user.invite", "user.join"]
    assert (await signed_in(database, NEW)).session.tenant_id == acme


async def test_of_two_acceptances_at_once_one_succeeds(
    database: Database, acme: UUID, admin: SignedIn
) -> None:
    token = (await invited(database, admin, NEW, "viewer")).token
    results = await asyncio.gather(
        accepted(database, token), accepted(database, token), return_exceptions=True
    )
    assert sorted(isinstance(each, SignedIn) for each in results) == [False, True]


async def test_a_link_ends_by_time_withdrawal_and_replacement(
    database: Database, acme: UUID, admin: SignedIn
) -> None:
    first = await invited(database, admin, NEW, "viewer")
    later = datetime.now(UTC) + timedelta(days=7)
    with pytest.raises(LinkNotValid):
        await accepted(database, first.token, now=later)
    second = await invited(database, admin, NEW, "billing")
    with pytest.raises(LinkNotValid):
        await accepted(database, first.token)
    async with acting(database, admin.session) as uow:
        await team.remove(uow, acme, second.id)
    with pytest.raises(LinkNotValid):
        await accepted(database, second.token)
    for nonsense in ("", "x", "ä", "x" * 500):
        with pytest.raises(LinkNotValid):
            await find_link(database, nonsense)
    assert await listed(database, acme) == [(MARA, "admin", "active")]


async def test_a_refused_acceptance_leaves_the_link(database: Database, acme: UUID, admin: SignedIn) -> None:
    token = (await invited(database, admin, NEW, "viewer")).token
    for weak in ("short", "a" * 20, NEW):
        with pytest.raises(InvalidField):
            await accepted(database, token, weak)
    assert (await accepted(database, token)).session.email == NEW


async def test_an_account_that_exists_accepts_with_its_own_password(
    database: Database, acme: UUID, admin: SignedIn
) -> None:
    rival = await make_tenant(database, "rival")
    await add_person(database, EVE, roles={rival: "admin"})
    token = (await invited(database, admin, EVE, "viewer")).token
    with pytest.raises(SignInRefused):
        await accepted(database, token, "some other password")
    opened = await accepted(database, token)
    assert (opened.session.tenant_id, opened.session.role) == (acme, "viewer")
    assert dict(opened.session.tenants) == {acme: "acme", rival: "rival"}


async def test_a_member_is_not_invited_again(database: Database, acme: UUID, admin: SignedIn) -> None:
    with pytest.raises(AlreadyMember):
        await invited(database, admin, MARA, "viewer")
    for email, role in (("nonsense", "viewer"), ("a@b\0", "viewer"), (NEW, "owner"), (NEW, "operator")):
        with pytest.raises(InvalidField):
            await invited(database, admin, email, role)


async def test_a_role_changes_at_once(database: Database, acme: UUID, admin: SignedIn) -> None:
    eve = await add_person(database, EVE, roles={acme: "admin"})
    opened = await signed_in(database, EVE)
    async with acting(database, admin.session) as uow:
        changed = await team.change_role(uow, acme, eve, "viewer", seen=1)
    assert (changed.role, changed.revision) == ("viewer", 2)
    assert await find_session(database, opened.token, "tenant") is None
    with pytest.raises(RevisionMoved):
        async with acting(database, admin.session) as uow:
            await team.change_role(uow, acme, eve, "billing", seen=1)
    again = await signed_in(database, EVE)
    assert again.session.role == "viewer"
    async with acting(database, admin.session) as uow:
        await team.change_role(uow, acme, eve, "viewer")
    assert await find_session(database, again.token, "tenant") is not None
    assert await actions(database, acme) == ["user.change_role"]


async def test_a_removed_member_is_out_at_once(database: Database, acme: UUID, admin: SignedIn) -> None:
    eve = await add_person(database, EVE, roles={acme: "developer"})
    opened = await signed_in(database, EVE)
    async with acting(database, admin.session) as uow:
        await team.remove(uow, acme, eve)
    assert await find_session(database, opened.token, "tenant") is None
    assert await listed(database, acme) == [(MARA, "admin", "active")]
    assert await actions(database, acme) == ["user.remove"]


async def test_the_last_admin_stays(database: Database, acme: UUID, admin: SignedIn) -> None:
    mara = admin.session.user_id
    await add_person(database, EVE, roles={acme: "developer"})
    with pytest.raises(LastAdmin):
        async with acting(database, admin.session) as uow:
            await team.change_role(uow, acme, mara, "viewer")
    with pytest.raises(LastAdmin):
        async with acting(database, admin.session) as uow:
            await team.remove(uow, acme, mara)
    assert await find_session(database, admin.token, "tenant") is not None


async def test_an_admin_who_may_not_sign_in_is_none(database: Database, acme: UUID, admin: SignedIn) -> None:
    eve = await add_person(database, EVE, roles={acme: "admin"})

    await disabled(database, EVE)
    mara = admin.session.user_id
    with pytest.raises(LastAdmin):
        async with acting(database, admin.session) as uow:
            await team.remove_member(uow, acme, mara)
    with pytest.raises(LastAdmin):
        async with acting(database, admin.session) as uow:
            await team.change_role(uow, acme, mara, "viewer")
    assert await find_session(database, admin.token, "tenant") is not None
    async with acting(database, admin.session) as uow:
        await team.remove_member(uow, acme, eve)


async def test_an_operator_disables_the_only_admin_too(
    database: Database, acme: UUID, admin: SignedIn
) -> None:
    rival, closed = await make_tenant(database, "rival"), await make_tenant(database, "closed")
    eve = await add_person(database, EVE, roles={rival: "admin", acme: "viewer"})
    async with unit_of_work(database, system_actor("test"), None, None) as uow:
        for tenant_id in (rival, closed):
            await memberships.add(uow.session, tenant_id, admin.session.user_id, "admin")
        await uow.session.execute(text("UPDATE tenants SET suspended_at = now() WHERE name = 'closed'"))
    assert await disabled(database, MARA) == ["acme", "closed"]
    assert await find_session(database, admin.token, "tenant") is None
    assert await disabled(database, MARA) == ["acme", "closed"]
    # An operator invites the next admin.
    async with unit_of_work(database, system_actor("test"), None, None) as uow:
        assert (await team.invite(uow, acme, NEW, "admin")).token
    assert await disabled(database, EVE) == ["rival"]
    async with unit_of_work(database, system_actor("test"), None, None) as uow:
        await team.change_role(uow, acme, eve, "admin")
        await accounts.enable_user(uow, EVE)
    assert await disabled(database, MARA) == ["closed"]


async def disabled(database: Database, email: str) -> list[str]:
    """Disable a person, as an operator; return the tenants that have no admin then."""
    async with unit_of_work(database, system_actor("test"), None, None) as uow:
        return (await accounts.disable_user(uow, email)).without_admin


async def test_open_invitations_are_bounded(
    database: Database, acme: UUID, admin: SignedIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MAX_OPEN", 2)
    monkeypatch.setattr(links, "MAX_A_DAY", 3)
    await invited(database, admin, "a@example.com", "viewer")
    for _ in range(3):
        last = await invited(database, admin, NEW, "viewer")
    with pytest.raises(CountReached, match=r"invited 3 times within 24 hours") as again:
        await invited(database, admin, NEW, "viewer")
    with pytest.raises(CountReached, match="at most 2 open invitations") as refused:
        await invited(database, admin, "b@example.com", "viewer")
    assert {each.value.field for each in (again, refused)} == {"email"}
    async with acting(database, admin.session) as uow:
        await team.revoke_invitation(uow, acme, last.id)
    assert (await invited(database, admin, "b@example.com", "viewer")).token


async def test_two_admins_do_not_remove_each_other(database: Database, acme: UUID, admin: SignedIn) -> None:
    eve = await add_person(database, EVE, roles={acme: "admin"})
    second = await signed_in(database, EVE)

    async def remove(author: SignedIn, user_id: UUID) -> None:
        async with acting(database, author.session) as uow:
            await team.remove_member(uow, acme, user_id)

    results = await asyncio.gather(
        remove(admin, eve), remove(second, admin.session.user_id), return_exceptions=True
    )
    assert sorted(type(each).__name__ for each in results) == ["LastAdmin", "NoneType"]


async def test_an_invitation_has_no_role_to_change(database: Database, acme: UUID, admin: SignedIn) -> None:
    entry = await invited(database, admin, NEW, "viewer")
    with pytest.raises(InvitationPending):
        async with acting(database, admin.session) as uow:
            await team.change_role(uow, acme, entry.id, "admin")


async def test_people_of_another_tenant_do_not_exist(database: Database, acme: UUID, admin: SignedIn) -> None:
    rival = await make_tenant(database, "rival")
    eve = await add_person(database, EVE, roles={rival: "admin"})
    theirs = await invited(database, await signed_in(database, EVE), NEW, "viewer")
    for entry_id in (eve, theirs.id, uuid4()):
        for work in (team.remove, team.remove_member, team.revoke_invitation, team.reset_member):
            with pytest.raises(UserNotFound):
                async with acting(database, admin.session) as uow:
                    await work(uow, acme, entry_id)
        with pytest.raises(UserNotFound):
            async with acting(database, admin.session) as uow:
                await team.change_role(uow, acme, entry_id, "viewer")
    async with database.as_tenant(acme) as session:
        seen = (await session.scalars(text("SELECT email FROM users"))).all()
        assert seen == [MARA]
        for table in ("memberships", "invitations", "sessions"):
            owners = await session.scalars(text(f"SELECT DISTINCT tenant_id FROM {table}"))
            assert set(owners) <= {acme}, table
    assert await listed(database, rival) == [(EVE, "admin", "active"), (NEW, "viewer", "invited")]


async def test_a_reset_link_ends_when_the_account_leads_to_more(
    database: Database, acme: UUID, admin: SignedIn
) -> None:
    eve = await add_person(database, EVE, roles={acme: "viewer"})
    rival = await make_tenant(database, "rival")
    await add_person(database, NEW, roles={rival: "admin"})
    async with acting(database, admin.session) as uow:
        token = await team.reset_member(uow, acme, eve)
    await accepted(database, (await invited(database, await signed_in(database, NEW), EVE, "admin")).token)
    with pytest.raises(LinkNotValid):
        await find_link(database, token)


async def test_an_admin_resets_those_who_belong_here_alone(
    database: Database, acme: UUID, admin: SignedIn
) -> None:
    rival = await make_tenant(database, "rival")
    eve = await add_person(database, EVE, roles={acme: "viewer", rival: "admin"})
    operator = await add_person(database, "op@example.com", roles={acme: "viewer"}, operator=True)
    for user_id in (eve, operator):
        with pytest.raises(ResetForbidden):
            async with acting(database, admin.session) as uow:
                await team.reset_member(uow, acme, user_id)
