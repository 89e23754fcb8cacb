"""Passwords: changed with the present one, reset by a link, and no session of before goes on."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pyotp
import pytest
from tests.tenants.people.people_world import (
    ADDRESS,
    PASSWORD,
    acting,
    add_person,
    cheap_passwords,
    own_account,
    signed_in,
)
from tests.tenants.registry_records import make_tenant

from loraplex.tenants.actors import system_actor
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InvalidField, LinkNotValid, SecondFactorNeeded, SignInRefused
from loraplex.tenants.people import accounts, second_factor, team
from loraplex.tenants.people.own_account import change_password, protection, reset_password
from loraplex.tenants.people.sessions import Client, SignedIn, find_session, renew_session
from loraplex.tenants.people.sign_in import use_link
from loraplex.tenants.unit_of_work import unit_of_work

__all__ = ["cheap_passwords"]
pytestmark = pytest.mark.usefixtures("cheap_passwords")
MARA, EVE, OTHER = "mara@example.com", "eve@example.com", "another long password"


@pytest.fixture
async def acme(database: Database) -> UUID:
    tenant_id = await make_tenant(database, "acme")
    await add_person(database, MARA, roles={tenant_id: "admin"})
    return tenant_id


async def changed(database: Database, opened: SignedIn, present: str, new: str) -> str:
    return await change_password(own_account(database, opened.session, present), new)


async def test_a_change_needs_the_present_one_and_ends_the_other_sessions(
    database: Database, acme: UUID
) -> None:
    other, opened = await signed_in(database, MARA), await signed_in(database, MARA)
    with pytest.raises(SignInRefused):
        await changed(database, opened, "wrong", OTHER)
    with pytest.raises(InvalidField):
        await changed(database, opened, PASSWORD, "short")
    token = await changed(database, opened, PASSWORD, OTHER)
    for ended in (other.token, opened.token):
        assert await find_session(database, ended, "tenant") is None
    assert await find_session(database, token, "tenant") is not None
    with pytest.raises(SignInRefused):
        await signed_in(database, MARA)
    assert (await signed_in(database, MARA, OTHER)).token


@pytest.mark.parametrize("removes", [False, True])
async def test_an_admin_resets_by_a_link(database: Database, acme: UUID, removes: bool) -> None:
    eve, admin = await add_person(database, EVE, roles={acme: "viewer"}), await signed_in(database, MARA)
    opened = await signed_in(database, EVE)
    secret = (await second_factor.enrol(own_account(database, opened.session))).secret
    own = own_account(database, opened.session)
    kept = (await second_factor.confirm(own, pyotp.TOTP(secret).now())).token
    async with acting(database, admin.session) as uow:
        first = await team.reset_member(uow, acme, eve)
        token = await team.reset_member(uow, acme, eve, second_factor=removes)
    for ended, now in ((first, None), (token, datetime.now(UTC) + timedelta(days=1))):
        with pytest.raises(LinkNotValid):
            await reset_password(database, ended, OTHER, address=ADDRESS, now=now)
    with pytest.raises(LinkNotValid):
        await use_link(database, token, Client(ADDRESS, None))
    with pytest.raises(InvalidField):
        await reset_password(database, token, "short", address=ADDRESS)
    assert await reset_password(database, token, OTHER, address=ADDRESS) == EVE
    with pytest.raises(LinkNotValid):
        await reset_password(database, token, OTHER, address=ADDRESS)
    assert await find_session(database, kept, "tenant") is None
    if removes:
        assert (await signed_in(database, EVE, OTHER)).token
    else:
        with pytest.raises(SecondFactorNeeded):
            await signed_in(database, EVE, OTHER)


async def test_an_account_without_a_password_changes_what_protects_it_soon_after_its_sign_in(
    database: Database, acme: UUID
) -> None:
    async with unit_of_work(database, system_actor("demo"), None, None) as uow:
        token = await accounts.demo_link(uow, acme)
    opened = await use_link(database, token, Client(ADDRESS, None))
    late = opened.session.signed_in_at + timedelta(minutes=6)
    assert (await protection(database, opened.session)).needs_sign_in is False
    assert (await protection(database, opened.session, now=late)).needs_sign_in is True
    own = own_account(database, opened.session, OTHER, now=late)
    for work in (
        change_password(own, OTHER),
        second_factor.enrol(own),
        second_factor.replace_recovery_codes(own, "000000"),
        second_factor.disable(own, "000000"),
    ):
        with pytest.raises(SignInRefused, match="sign in again"):
            await work
    # Another token of the same sign-in is no new one.
    async with acting(database, opened.session) as uow:
        token = await renew_session(uow, opened.session)
    renewed = await find_session(database, token, "tenant")
    assert renewed is not None and renewed.signed_in_at == opened.session.signed_in_at
    token = await change_password(own_account(database, renewed, ""), OTHER)
    session = await find_session(database, token, "tenant")
    assert session is not None and (await protection(database, session)).has_password
    with pytest.raises(SignInRefused):
        await second_factor.enrol(own_account(database, session, ""))


async def test_the_demos_link_signs_in_once(database: Database, acme: UUID) -> None:
    async with unit_of_work(database, system_actor("demo"), None, None) as uow:
        first = await accounts.demo_link(uow, acme)
    async with unit_of_work(database, system_actor("demo"), None, None) as uow:
        second = await accounts.demo_link(uow, acme)
    with pytest.raises(LinkNotValid):
        await use_link(database, first, Client(ADDRESS, None))
    opened = await use_link(database, second, Client(ADDRESS, None))
    assert (opened.session.tenant_name, opened.session.role) == ("acme", "admin")
    with pytest.raises(LinkNotValid):
        await use_link(database, second, Client(ADDRESS, None))
