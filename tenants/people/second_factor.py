"""The second factor: codes of an authenticator app (TOTP, RFC 6238), and recovery codes in their place.

Invariant: a code works once; the secret is stored encrypted, with a key of its own per account.
"""

import io
from dataclasses import dataclass, field
from typing import Final

import pyotp
import segno

from loraplex.tenants.database import writing
from loraplex.tenants.errors import InvalidField, SecondFactorState
from loraplex.tenants.people import users
from loraplex.tenants.people.codes import STEP_S, SecondFactorSecrets, issue_recovery_codes, matching_step
from loraplex.tenants.people.identity import ConsoleSession
from loraplex.tenants.people.own_account import OwnAccount
from loraplex.tenants.people.sessions import renew_session
from loraplex.tenants.unit_of_work import UnitOfWork

ISSUER: Final = "loraplex"


@dataclass(frozen=True, slots=True)
class Enrolment:
    """A new secret, to be entered into the app. `qr_svg`: the URI as an SVG image, without scripts and styles."""

    secret: str = field(repr=False)
    uri: str = field(repr=False)
    qr_svg: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class TurnedOn:
    """The new token of the session that turned the second factor on, and the recovery codes. Both are returned once."""

    token: str = field(repr=False)
    recovery_codes: list[str] = field(repr=False)


async def enrol(own: OwnAccount) -> Enrolment:
    """Give the account a new secret, which counts once `confirm` has a code of it.

    Raises `SignInRefused`, `SignInSlowed`, and `SecondFactorState` while the account has a second factor.
    """
    session, secret = own.session, pyotp.random_base32()
    await own.confirm()
    async with own.unit_of_work() as uow, writing(uow.session):
        if (await users.credentials(uow.session, session.user_id)).has_second_factor:
            raise SecondFactorState("this account has a second factor: remove it first")
        encrypted = SecondFactorSecrets(own.derive_key).encrypt(session.user_id, secret)
        await users.set_second_factor(uow.session, session.user_id, encrypted)
    uri = pyotp.TOTP(secret, interval=STEP_S).provisioning_uri(name=session.email, issuer_name=ISSUER)
    return Enrolment(secret, uri, _qr_svg(uri))


async def confirm(own: OwnAccount, code: str) -> TurnedOn:
    """Turn the second factor on. All other sessions of the person end. The password was entered to `enrol`; codes that are
    wrong are counted as at a sign-in, since an enrolment that was left may be found by another person.

    Raises `InvalidField` for a wrong code, `SecondFactorState` without an enrolment, `SignInSlowed`.
    """
    session = own.session
    async with own.check.guess(), own.unit_of_work() as uow:
        async with writing(uow.session):
            credentials = await users.credentials(uow.session, session.user_id)
            if credentials.totp_secret is None or credentials.has_second_factor:
                raise SecondFactorState("there is no second factor to confirm: begin again")
            secret = SecondFactorSecrets(own.derive_key).decrypt(session.user_id, credentials.totp_secret)
            step = matching_step(secret, code, own.now)
            if step is None or not await users.use_step(uow.session, session.user_id, step, confirm=True):
                raise InvalidField("code", "the code is wrong: enter the newest one")
            codes = await issue_recovery_codes(uow.session, session.user_id, own.derive_key)
        await _record(uow, session, before=False)
        return TurnedOn(await renew_session(uow, session, second_factor=True), codes)


async def disable(own: OwnAccount, code: str) -> str:
    """Turn the second factor off with a code of it, or a recovery code; return the new token of this session. All other
    sessions and the recovery codes end.

    Raises `SignInRefused` for a wrong password or code, `SignInSlowed`, `SecondFactorState` for an account without a second
    factor.
    """
    session = own.session
    await own.confirm()
    if not (await own.check.code(code)).has_second_factor:
        raise SecondFactorState("this account has no second factor")
    async with own.unit_of_work() as uow:
        async with writing(uow.session):
            await users.set_second_factor(uow.session, session.user_id, None)
        await _record(uow, session, before=True)
        return await renew_session(uow, session, second_factor=False)


async def replace_recovery_codes(own: OwnAccount, code: str) -> list[str]:
    """Give the account new recovery codes, which end the present ones. It takes a code, as `disable`: a recovery code would
    otherwise be a way around the second factor.

    Raises `SignInRefused`, `SignInSlowed`, and `SecondFactorState` for an account without a second factor.
    """
    await own.confirm()
    await own.check.code(code)
    user_id = own.session.user_id
    async with own.unit_of_work() as uow:
        async with writing(uow.session):
            if not (await users.credentials(uow.session, user_id)).has_second_factor:
                raise SecondFactorState("this account has no second factor: set it up first")
            codes = await issue_recovery_codes(uow.session, user_id, own.derive_key)
        await uow.audit.record("user.recovery_codes", f"users/{user_id}", None, {"codes": len(codes)})
        return codes


async def _record(uow: UnitOfWork, session: ConsoleSession, *, before: bool) -> None:
    target = f"users/{session.user_id}"
    await uow.audit.record(
        "user.second_factor", target, {"second_factor": before}, {"second_factor": not before}
    )


def _qr_svg(uri: str) -> str:
    image = io.BytesIO()
    segno.make(uri, error="m").save(image, kind="svg", xmldecl=False, svgns=True, scale=4, omitsize=False)
    return image.getvalue().decode()
