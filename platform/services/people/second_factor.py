"""The second factor: codes of an authenticator app (TOTP, RFC 6238).

Invariant: a code works once; the secret is stored encrypted, with a key of its own per account.
"""

import base64
import io
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

import pyotp
import segno
from cryptography.fernet import Fernet, InvalidToken

from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.services.people.sessions import renew_session
from loraplex.platform.services.stored_responses import DeriveKey
from loraplex.platform.services.unit_of_work import UnitOfWork
from loraplex.tenants.database import writing
from loraplex.tenants.errors import InvalidField, SecondFactorState
from loraplex.tenants.people.users import CredentialRepository

DOMAIN: Final = b"loraplex/totp/v1"
STEP_S: Final = 30
ISSUER: Final = "loraplex"


class SecondFactorSecrets:
    """Encrypts (Fernet) the secrets of accounts."""

    def __init__(self, derive_key: DeriveKey) -> None:
        self._derive_key = derive_key

    def encrypt(self, user_id: UUID, secret: str) -> bytes:
        return self._fernet(user_id).encrypt(secret.encode())

    def decrypt(self, user_id: UUID, encrypted: bytes) -> str:
        """Return the secret. Raises `SecondFactorState` when the server secret has changed since."""
        try:
            return self._fernet(user_id).decrypt(encrypted).decode()
        except InvalidToken as error:
            raise SecondFactorState(
                "the second factor can no longer be read: an operator resets it with `loraplex user reset`"
            ) from error

    def _fernet(self, user_id: UUID) -> Fernet:
        return Fernet(base64.urlsafe_b64encode(self._derive_key(DOMAIN, user_id.bytes)))


@dataclass(frozen=True, slots=True)
class Enrolment:
    """A new secret, to be entered into the app. `qr_svg`: the URI as an SVG image, without scripts and styles."""

    secret: str = field(repr=False)
    uri: str = field(repr=False)
    qr_svg: str = field(repr=False)


def matching_step(secret: str, code: str, now: datetime) -> int | None:
    """Return the time step of a code, of the present step or one next to it; None for a wrong code."""
    entered = code.replace(" ", "")
    present = int(now.timestamp()) // STEP_S
    generator = pyotp.TOTP(secret, interval=STEP_S)
    steps = (present, present - 1, present + 1)
    return next(
        (step for step in steps if pyotp.utils.strings_equal(entered, generator.generate_otp(step))), None
    )


async def enrol(uow: UnitOfWork, session: ConsoleSession, *, derive_key: DeriveKey) -> Enrolment:
    """Give the account a new secret, which counts once `confirm` has a code of it.

    Raises `SecondFactorState` while the account has a second factor.
    """
    secret = pyotp.random_base32()
    async with writing(uow.session):
        users = CredentialRepository(uow.session)
        if (await users.by_id(session.user_id)).has_second_factor:
            raise SecondFactorState("this account has a second factor: remove it first")
        encrypted = SecondFactorSecrets(derive_key).encrypt(session.user_id, secret)
        await users.set_second_factor(session.user_id, encrypted)
    uri = pyotp.TOTP(secret, interval=STEP_S).provisioning_uri(name=session.email, issuer_name=ISSUER)
    return Enrolment(secret, uri, _qr_svg(uri))


async def confirm(
    uow: UnitOfWork,
    session: ConsoleSession,
    code: str,
    *,
    derive_key: DeriveKey,
    now: datetime | None = None,
) -> str:
    """Turn the second factor on; return the new token of this session. All other sessions of the person end.

    Raises `InvalidField` for a wrong code, `SecondFactorState` without an enrolment.
    """
    async with writing(uow.session):
        await _use(uow, session, code, derive_key, now or datetime.now(UTC), confirm=True)
    await uow.audit.record(
        "user.second_factor", _target(session), {"second_factor": False}, {"second_factor": True}
    )
    return await renew_session(uow, session, second_factor=True)


async def disable(
    uow: UnitOfWork,
    session: ConsoleSession,
    code: str,
    *,
    derive_key: DeriveKey,
    now: datetime | None = None,
) -> str:
    """Turn the second factor off with a code of it; return the new token of this session. All other sessions end.

    Raises `InvalidField` for a wrong code, `SecondFactorState` for an account without a second factor.
    """
    async with writing(uow.session):
        users = CredentialRepository(uow.session)
        if not (await users.by_id(session.user_id)).has_second_factor:
            raise SecondFactorState("this account has no second factor")
        await _use(uow, session, code, derive_key, now or datetime.now(UTC), confirm=False)
        await users.set_second_factor(session.user_id, None)
    await uow.audit.record(
        "user.second_factor", _target(session), {"second_factor": True}, {"second_factor": False}
    )
    return await renew_session(uow, session, second_factor=False)


async def _use(
    uow: UnitOfWork,
    session: ConsoleSession,
    code: str,
    derive_key: DeriveKey,
    now: datetime,
    *,
    confirm: bool,
) -> None:
    users = CredentialRepository(uow.session)
    encrypted = (await users.by_id(session.user_id)).totp_secret
    if encrypted is None:
        raise SecondFactorState("this account has no second factor to confirm: begin again")
    step = matching_step(SecondFactorSecrets(derive_key).decrypt(session.user_id, encrypted), code, now)
    if step is None or not await users.use_step(session.user_id, step, confirm=confirm):
        raise InvalidField("code", "the code is wrong or was used already: enter the newest one")


def _qr_svg(uri: str) -> str:
    image = io.BytesIO()
    segno.make(uri, error="m").save(image, kind="svg", xmldecl=False, svgns=True, scale=4, omitsize=False)
    return image.getvalue().decode()


def _target(session: ConsoleSession) -> str:
    return f"users/{session.user_id}"
