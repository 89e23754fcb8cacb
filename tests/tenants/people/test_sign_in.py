"""Signing in: the right pair only, a new token each time, and rights that are read at every request."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from sqlalchemy import text
from tests.tenants.people.people_world import (
    ADDRESS,
    PASSWORD,
    add_person,
    cheap_passwords,
    signed_in,
)
from tests.tenants.registry_records import make_tenant

from loraplex.tenants.database import Database
from loraplex.tenants.errors import SignInRefused
from loraplex.tenants.people.identity import ABSOLUTE
from loraplex.tenants.people.sessions import IDLE, find_session
from loraplex.tenants.scopes import TENANT_SCOPES

__all__ = ["cheap_passwords"]
pytestmark = pytest.mark.usefixtures("cheap_passwords")
MARA = "mara@example.com"


@pytest.fixture
async def acme(database: Database) -> UUID:
    return await make_tenant(database, "acme")


async def test_the_right_pair_opens_a_session(database: Database, acme: UUID) -> None:
    user_id = await add_person(database, MARA, roles={acme: "admin"})
    first = await signed_in(database, " Mara@Example.com ")
    session = first.session
    assert (session.user_id, session.email, session.name) == (user_id, MARA, "Mara")
    assert (session.tenant_id, session.tenant_name, session.role) == (acme, "acme", "admin")
    assert session.scopes == TENANT_SCOPES and not session.operator and not session.second_factor
    assert session.tenants == ((acme, "acme"),) and len(session.csrf_token) == 64
    assert await find_session(database, first.token, "tenant") == session
    assert await find_session(database, first.token, "operator") is None
    again = await signed_in(database, MARA)
    assert again.token != first.token and again.session.csrf_token != session.csrf_token
    assert first.token not in repr(first) and session.csrf_token not in repr(session)


@pytest.mark.parametrize("pair", [(MARA, "wrong"), ("unknown@example.com", PASSWORD), ("", ""), ("\0", "\0")])
async def test_a_wrong_pair_is_refused_in_the_same_words(
    database: Database, acme: UUID, pair: tuple[str, str]
) -> None:
    await add_person(database, MARA, roles={acme: "admin"})
    with pytest.raises(SignInRefused, match=r"^Email or password is wrong\.$"):
        await signed_in(database, *pair)


async def test_a_session_ends_idle_and_absolutely(database: Database, acme: UUID) -> None:
    await add_person(database, MARA, roles={acme: "viewer"})
    begin, second = datetime.now(UTC), timedelta(seconds=1)
    opened = await signed_in(database, MARA, now=begin)
    assert opened.session.expires_at == begin + ABSOLUTE
    now = datetime.now(UTC)
    assert await find_session(database, opened.token, "tenant", now=now + IDLE - second)
    assert await find_session(database, opened.token, "tenant", now=now + 2 * IDLE - 2 * second)
    assert await find_session(database, opened.token, "tenant", now=now + 3 * IDLE) is None
    kept = await signed_in(database, MARA, now=begin)
    while begin < opened.session.expires_at - IDLE:
        begin += IDLE / 2
        assert await find_session(database, kept.token, "tenant", now=begin)
    assert await find_session(database, kept.token, "tenant", now=opened.session.expires_at) is None


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM memberships",
        "UPDATE users SET disabled_at = now()",
        "UPDATE tenants SET suspended_at = now()",
        "UPDATE tenants SET deleted_at = now()",
    ],
)
async def test_a_session_ends_with_what_it_rests_on(database: Database, acme: UUID, change: str) -> None:
    await add_person(database, MARA, roles={acme: "admin"})
    opened = await signed_in(database, MARA)
    async with database.as_operator() as session:
        await session.execute(text(change))
    assert await find_session(database, opened.token, "tenant") is None
    with pytest.raises(SignInRefused):
        await signed_in(database, MARA)


async def test_an_operator_has_an_area_apart(database: Database, acme: UUID) -> None:
    await add_person(database, "op@example.com", operator=True)
    await add_person(database, MARA, roles={acme: "admin"})
    opened = await signed_in(database, "op@example.com")
    assert opened.session.tenant_id is None and opened.session.scopes == {"operator"}
    assert await find_session(database, opened.token, "tenant") is None
    assert await find_session(database, opened.token, "operator") == opened.session
    with pytest.raises(SignInRefused, match="no operator"):
        await signed_in(database, MARA, area="operator")
    with pytest.raises(SignInRefused, match="no tenant"):
        await signed_in(database, "op@example.com", area="tenant")
    async with database.as_operator() as session:
        await session.execute(text("UPDATE users SET is_operator = false"))
    assert await find_session(database, opened.token, "operator") is None


async def test_only_a_digest_of_the_token_is_stored(database: Database, acme: UUID) -> None:
    await add_person(database, MARA, roles={acme: "admin"})
    token = (await signed_in(database, MARA)).token
    async with database.as_writer() as session:
        stored = (
            await session.execute(
                text("SELECT sessions::text || encode(token_sha256, 'escape') FROM sessions")
            )
        ).scalar_one()
        hashed = (await session.execute(text("SELECT password_hash FROM users"))).scalar_one()
    assert token not in stored and ADDRESS in stored
    assert hashed.startswith("$argon2id$") and PASSWORD not in hashed


async def test_a_sign_in_is_in_the_audit_log_of_its_tenant(database: Database, acme: UUID) -> None:
    await add_person(database, MARA, roles={acme: "admin"})
    await signed_in(database, MARA)
    async with database.as_tenant(acme) as session:
        query = text("SELECT actor_kind, actor, action, host(address) FROM audit_entries")
        assert (await session.execute(query)).all() == [("user", MARA, "session.create", ADDRESS)]
