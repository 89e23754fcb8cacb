"""The second factor: enrolled with a code, asked for at each sign-in, and no code works twice."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pyotp
import pytest
from sqlalchemy import text
from tests.platform.services.people.people_world import (
    ADDRESS,
    acting,
    actions,
    add_person,
    cheap_passwords,
    derive_key,
    signed_in,
)
from tests.tenants.registry_records import make_tenant

from loraplex.platform.services.people import second_factor
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.services.people.second_factor import Enrolment
from loraplex.platform.services.people.sessions import find_session
from loraplex.platform.services.people.sign_in import SignedIn
from loraplex.tenants.database import Database
from loraplex.tenants.errors import (
    InvalidField,
    SecondFactorNeeded,
    SecondFactorState,
    SignInRefused,
    SignInSlowed,
)

__all__ = ["cheap_passwords"]
pytestmark = pytest.mark.usefixtures("cheap_passwords")
MARA, NOW = "mara@example.com", datetime(2026, 11, 23, 12, 0, 15, tzinfo=UTC)


@pytest.fixture
async def acme(database: Database) -> UUID:
    tenant_id = await make_tenant(database, "acme")
    await add_person(database, MARA, roles={tenant_id: "admin"})
    return tenant_id


async def enrolled(database: Database, session: ConsoleSession) -> Enrolment:
    async with acting(database, session) as uow:
        return await second_factor.enrol(uow, session, derive_key=derive_key)


async def turned_on(database: Database) -> tuple[str, SignedIn, str]:
    """Return the secret, the session that turned the second factor on, and that session's new token."""
    opened = await signed_in(database, MARA)
    secret = (await enrolled(database, opened.session)).secret
    async with acting(database, opened.session) as uow:
        token = await second_factor.confirm(
            *(uow, opened.session, code_at(secret, NOW)), derive_key=derive_key, now=NOW
        )
    return secret, opened, token


def code_at(secret: str, time: datetime) -> str:
    return pyotp.TOTP(secret).at(time)


async def test_it_counts_once_a_code_confirms_it(database: Database, acme: UUID) -> None:
    other = await signed_in(database, MARA)
    opened = await signed_in(database, MARA)
    enrolment = await enrolled(database, opened.session)
    assert enrolment.uri.startswith("otpauth://totp/loraplex:mara%40example.com?secret=")
    assert enrolment.qr_svg.startswith("<svg") and "<script" not in enrolment.qr_svg
    assert enrolment.secret not in repr(enrolment)
    assert (await signed_in(database, MARA)).session.second_factor is False
    with pytest.raises(InvalidField, match="wrong"):
        async with acting(database, opened.session) as uow:
            await second_factor.confirm(uow, opened.session, "000000", derive_key=derive_key, now=NOW)
    async with acting(database, opened.session) as uow:
        token = await second_factor.confirm(
            *(uow, opened.session, code_at(enrolment.secret, NOW)), derive_key=derive_key, now=NOW
        )
    # The rights of the session changed: it has another token, and no other session is left.
    assert token != opened.token
    assert await find_session(database, opened.token, "tenant") is None
    assert await find_session(database, other.token, "tenant") is None
    renewed = await find_session(database, token, "tenant")
    assert renewed is not None and renewed.second_factor
    assert await actions(database, acme) == ["user.second_factor"]


async def test_a_sign_in_needs_a_code_that_was_not_used(database: Database, acme: UUID) -> None:
    secret, _, _ = await turned_on(database)
    with pytest.raises(SecondFactorNeeded):
        await signed_in(database, MARA)
    for wrong in ("", "000000", code_at(secret, NOW), code_at(secret, NOW + timedelta(minutes=5))):
        with pytest.raises(SignInRefused, match="code"):
            await signed_in(database, MARA, code=wrong, now=NOW)
    later = NOW + timedelta(seconds=60)
    fresh = code_at(secret, later)
    opened = await signed_in(database, MARA, code=f"{fresh[:3]} {fresh[3:]}", now=later)
    assert opened.session.second_factor
    with pytest.raises(SignInRefused, match="used already"):
        await signed_in(database, MARA, code=fresh, now=later)
    # The clock of a phone may be half a minute off; an older code than the one that was used works no longer.
    ahead = later + timedelta(seconds=30)
    assert (await signed_in(database, MARA, code=code_at(secret, ahead), now=later)).token
    with pytest.raises(SignInRefused):
        await signed_in(database, MARA, code=code_at(secret, later), now=ahead)


async def test_codes_are_slowed_as_passwords_are(database: Database, acme: UUID) -> None:
    await turned_on(database)
    for _ in range(10):
        with pytest.raises(SignInRefused):
            await signed_in(database, MARA, code="000000", now=NOW)
    with pytest.raises(SignInSlowed):
        await signed_in(database, MARA, code="000000", now=NOW)


async def test_it_is_turned_off_with_a_code(database: Database, acme: UUID) -> None:
    secret, _, token = await turned_on(database)
    session = await find_session(database, token, "tenant")
    assert session is not None
    with pytest.raises(SecondFactorState, match="remove it first"):
        await enrolled(database, session)
    later = NOW + timedelta(seconds=60)

    async def disable(code: str) -> str:
        return await second_factor.disable(
            *(database, session, code),
            address=ADDRESS,
            request_id=None,
            derive_key=derive_key,
            now=later,
        )

    with pytest.raises(SignInRefused):
        await disable("000000")
    renewed = await disable(code_at(secret, later))
    assert await find_session(database, token, "tenant") is None
    assert await find_session(database, renewed, "tenant") is not None
    assert not (await signed_in(database, MARA)).session.second_factor
    with pytest.raises(SecondFactorState):
        await disable("")


async def test_the_secret_is_stored_encrypted_for_its_account(database: Database, acme: UUID) -> None:
    secret, _, _ = await turned_on(database)
    other = await add_person(database, "eve@example.com", roles={acme: "viewer"})
    async with database.as_writer() as session:
        stored = (
            await session.scalars(text("SELECT totp_secret FROM users WHERE email = 'mara@example.com'"))
        ).one()
        await session.execute(
            text("UPDATE users SET totp_secret = :secret, totp_confirmed_at = now() WHERE id = :id"),
            {"secret": stored, "id": other},
        )
    assert secret.encode() not in stored
    with pytest.raises(SecondFactorState, match="no longer be read"):
        await signed_in(database, "eve@example.com", code=code_at(secret, NOW), now=NOW)
