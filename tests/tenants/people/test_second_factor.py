"""The second factor: enrolled with a code, asked for at each sign-in, and no code works twice."""

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pyotp
import pytest
from sqlalchemy import text
from tests.tenants.people.people_world import (
    PASSWORD,
    actions,
    add_person,
    cheap_passwords,
    own_account,
    signed_in,
)
from tests.tenants.registry_records import make_tenant

from loraplex.tenants.database import Database
from loraplex.tenants.errors import (
    InvalidField,
    SecondFactorNeeded,
    SecondFactorState,
    SignInRefused,
    SignInSlowed,
)
from loraplex.tenants.people import second_factor
from loraplex.tenants.people.identity import ConsoleSession
from loraplex.tenants.people.own_account import Protection, protection
from loraplex.tenants.people.second_factor import Enrolment, TurnedOn
from loraplex.tenants.people.sessions import SignedIn, find_session

__all__ = ["cheap_passwords"]
pytestmark = pytest.mark.usefixtures("cheap_passwords")
MARA = "mara@example.com"
# In the middle of a code's time. Of today: a session is renewed for a week from its sign-in, by the server's clock.
NOW = datetime.now(UTC).replace(second=15, microsecond=0)


@pytest.fixture
async def acme(database: Database) -> UUID:
    tenant_id = await make_tenant(database, "acme")
    await add_person(database, MARA, roles={tenant_id: "admin"})
    return tenant_id


async def enrolled(database: Database, session: ConsoleSession) -> Enrolment:
    return await second_factor.enrol(own_account(database, session))


async def turned_on(database: Database) -> tuple[str, SignedIn, TurnedOn]:
    """Return the secret, the session that turned the second factor on, and what that returned."""
    opened = await signed_in(database, MARA)
    secret = (await enrolled(database, opened.session)).secret
    result = await second_factor.confirm(own_account(database, opened.session, now=NOW), code_at(secret, NOW))
    return secret, opened, result


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
    own = own_account(database, opened.session, now=NOW)
    with pytest.raises(InvalidField, match="wrong"):
        await second_factor.confirm(own, "000000")
    result = await second_factor.confirm(own, code_at(enrolment.secret, NOW))
    token = result.token
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
    for number in range(10):
        with pytest.raises(SignInRefused):
            await signed_in(database, MARA, code=("000000", "00000-00000")[number % 2], now=NOW)
    with pytest.raises(SignInSlowed):
        await signed_in(database, MARA, code="000000", now=NOW)


async def test_the_password_makes_no_room_for_further_codes(database: Database, acme: UUID) -> None:
    session = await find_session(database, (await turned_on(database))[2].token, "tenant")
    assert session is not None
    own = own_account(database, session, now=NOW)
    for number in range(10):
        guess = (second_factor.disable, second_factor.replace_recovery_codes)[number % 2]
        with pytest.raises(SignInRefused, match="code"):
            await guess(own, "000000")
    for refused in (second_factor.disable(own, "000000"), signed_in(database, MARA, code="000000", now=NOW)):
        with pytest.raises(SignInSlowed):
            await refused


async def test_codes_that_confirm_are_slowed(database: Database, acme: UUID) -> None:
    opened = await signed_in(database, MARA, now=NOW)
    secret = (await enrolled(database, opened.session)).secret
    own = own_account(database, opened.session, now=NOW)
    for _ in range(10):
        with pytest.raises(InvalidField):
            await second_factor.confirm(own, "000000")
    with pytest.raises(SignInSlowed):
        await second_factor.confirm(own, code_at(secret, NOW))


async def test_it_is_turned_off_with_password_and_code(database: Database, acme: UUID) -> None:
    secret, _, result = await turned_on(database)
    session = await find_session(database, result.token, "tenant")
    assert session is not None
    with pytest.raises(SecondFactorState, match="remove it first"):
        await enrolled(database, session)
    later = NOW + timedelta(seconds=60)

    async def disable(code: str, password: str = PASSWORD) -> str:
        return await second_factor.disable(own_account(database, session, password, now=later), code)

    for code, password in (("000000", PASSWORD), (code_at(secret, later), "wrong"), ("", PASSWORD)):
        with pytest.raises(SignInRefused):
            await disable(code, password)
    renewed = await disable(code_at(secret, later))
    assert await find_session(database, result.token, "tenant") is None
    assert await find_session(database, renewed, "tenant") is not None
    assert not (await signed_in(database, MARA)).session.second_factor
    with pytest.raises(SecondFactorState):
        await disable("")
    ended = await find_session(database, renewed, "tenant")
    assert ended is not None and await protection(database, ended) == Protection(
        has_password=True, second_factor=False, recovery_codes=0, needs_sign_in=False
    )


async def test_a_recovery_code_takes_the_place_of_one_code(database: Database, acme: UUID) -> None:
    _, _, result = await turned_on(database)
    first, second, third, *rest = result.recovery_codes
    assert len({first, second, third, *rest}) == 10 and first not in repr(result)
    opened = await signed_in(database, MARA, code=first, now=NOW)
    assert opened.session.second_factor
    assert (await protection(database, opened.session)).recovery_codes == 9
    for wrong in (first, second[:-1], "00000-00000"):
        with pytest.raises(SignInRefused, match="code"):
            await signed_in(database, MARA, code=wrong, now=NOW)
    # As people type it from paper.
    typed = second.replace("-", " ").upper().replace("0", "O").replace("1", "l")
    assert (await signed_in(database, MARA, code=f" {typed} ", now=NOW)).token
    off = await second_factor.disable(own_account(database, opened.session, now=NOW), third)
    session = await find_session(database, off, "tenant")
    assert session is not None and (await protection(database, session)).recovery_codes == 0
    assert (await actions(database, None)).count("user.use_recovery_code") == 3


async def test_one_recovery_code_opens_one_of_two_sign_ins_at_once(database: Database, acme: UUID) -> None:
    code = (await turned_on(database))[2].recovery_codes[0]
    results = await asyncio.gather(
        *(signed_in(database, MARA, code=code, now=NOW) for _ in range(2)), return_exceptions=True
    )
    assert sorted(type(each).__name__ for each in results) == ["SignInRefused", "SignedIn"]


async def test_new_recovery_codes_end_the_present_ones(database: Database, acme: UUID) -> None:
    secret, _, result = await turned_on(database)
    session = await find_session(database, result.token, "tenant")
    assert session is not None
    later = NOW + timedelta(seconds=60)
    own, code = own_account(database, session, now=later), code_at(secret, later)
    with pytest.raises(SignInRefused, match="password"):
        await second_factor.replace_recovery_codes(own_account(database, session, "wrong"), code)
    with pytest.raises(SignInRefused, match="code"):
        await second_factor.replace_recovery_codes(own, "")
    codes = await second_factor.replace_recovery_codes(own, code)
    with pytest.raises(SignInRefused):
        await signed_in(database, MARA, code=result.recovery_codes[0], now=NOW)
    assert (await signed_in(database, MARA, code=codes[0], now=NOW)).token
    assert await actions(database, acme) == ["user.second_factor", "user.recovery_codes"]
    await add_person(database, "eve@example.com", roles={acme: "viewer"})
    eve = await signed_in(database, "eve@example.com")
    with pytest.raises(SecondFactorState, match="set it up first"):
        await second_factor.replace_recovery_codes(own_account(database, eve.session), "")
    for code in codes[1:3]:
        with pytest.raises(SignInRefused):
            await signed_in(database, "eve@example.com", "wrong", code=code, now=NOW)


async def test_recovery_codes_are_stored_as_keyed_digests_alone(database: Database, acme: UUID) -> None:
    codes = [each.replace("-", "") for each in (await turned_on(database))[2].recovery_codes]
    async with database.as_writer() as session:
        stored = (await session.execute(text("SELECT * FROM recovery_codes"))).all()
        assert len(stored) == 10
        for code in codes:
            assert code not in str(stored)
            assert hashlib.sha256(code.encode()).digest() not in [row.code_digest for row in stored]


async def test_enrolling_asks_for_the_password(database: Database, acme: UUID) -> None:
    opened = await signed_in(database, MARA)
    with pytest.raises(SignInRefused):
        await second_factor.enrol(own_account(database, opened.session, "wrong"))


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
