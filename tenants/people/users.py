"""Accounts of people. Invariant: an address has at most one account, and secrets are read by the gateway's role alone."""

from dataclasses import dataclass, field
from uuid import UUID, uuid4

from sqlalchemy import ColumnElement, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import NameTaken, UserNotFound
from loraplex.tenants.models import Membership, User
from loraplex.tenants.names import EMAIL, check_email, check_person_name, is_name
from loraplex.tenants.people.codes import replace_codes


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a sign-in is compared with. `totp_secret` is encrypted; it counts once `has_second_factor`."""

    user_id: UUID
    email: str
    name: str
    is_operator: bool
    is_disabled: bool
    password_hash: str | None = field(repr=False)
    totp_secret: bytes | None = field(repr=False)
    has_second_factor: bool


_CREDENTIALS = (
    User.id.label("user_id"),
    *(User.email, User.name, User.is_operator, User.password_hash, User.totp_secret),
    User.disabled_at.is_not(None).label("is_disabled"),
    User.totp_confirmed_at.is_not(None).label("has_second_factor"),
)


async def create(session: AsyncSession, email: str, name: str, password_hash: str | None) -> UUID:
    """Create an account, as an operator, and return its id. Raises `InvalidName`, `NameTaken`."""
    address = check_email(email)
    if await by_email(session, address) is not None:
        raise NameTaken(f"an account with the address {address} exists already")
    user_id = uuid4()
    values = {"id": user_id, "email": address, "name": check_person_name(name)}
    await session.execute(insert(User).values(**values, password_hash=password_hash))
    return user_id


async def by_email(session: AsyncSession, email: str) -> User | None:
    """Return the account of an address, as an operator; None without one."""
    address = _address(email)
    if address is None:
        return None
    return (await session.scalars(select(User).where(User.email == address))).one_or_none()


async def get(session: AsyncSession, email: str) -> User:
    """Return the account of an address, as an operator. Raises `UserNotFound`."""
    user = await by_email(session, email)
    if user is None:
        raise UserNotFound(f"no account with the address {email[:100]!r}")
    return user


async def change(session: AsyncSession, user_id: UUID, **values: object) -> None:
    """Store these columns of an account; secrets take the gateway's role."""
    await session.execute(update(User).where(User.id == user_id).values(**values))


async def credentials_of(session: AsyncSession, email: str) -> Credentials | None:
    """Return the credentials of an address; None without an account. `session` has the gateway's role (`as_writer`, `writing`)
    here and below.
    """
    address = _address(email)
    return None if address is None else await _credentials(session, User.email == address)


async def credentials(session: AsyncSession, user_id: UUID) -> Credentials:
    """Raises `UserNotFound`."""
    found = await _credentials(session, User.id == user_id)
    if found is None:
        raise UserNotFound("no such person")
    return found


async def credentials_of_identity(session: AsyncSession, issuer: str, subject: str) -> Credentials | None:
    """Return the credentials linked to an identity of an identity provider."""
    return await _credentials(session, (User.oidc_issuer == issuer) & (User.oidc_subject == subject))


async def link_identity(session: AsyncSession, user_id: UUID, issuer: str, subject: str) -> bool:
    """Link an account to its identity; False if it has another one."""
    same = (User.oidc_issuer == issuer) & (User.oidc_subject == subject)
    unlinked = or_(User.oidc_issuer.is_(None), same)
    statement = update(User).where(User.id == user_id, unlinked).returning(User.id)
    return await session.scalar(statement.values(oidc_issuer=issuer, oidc_subject=subject)) is not None


async def has_identity(session: AsyncSession, user_id: UUID) -> bool:
    """Whether an account is linked to an identity."""
    query = select(User.id).where(User.id == user_id, User.oidc_issuer.is_not(None))
    return await session.scalar(query) is not None


async def set_second_factor(session: AsyncSession, user_id: UUID, encrypted: bytes | None) -> None:
    """Store a new TOTP secret, which counts when it is confirmed; None removes the second factor. Recovery codes end."""
    await replace_codes(session, user_id, ())
    await change(session, user_id, totp_secret=encrypted, totp_confirmed_at=None, totp_last_step=None)


async def use_step(session: AsyncSession, user_id: UUID, step: int, *, confirm: bool = False) -> bool:
    """Use the code of a time step; False if that one or a later one was used. `confirm`: the secret counts from now on."""
    unused = or_(User.totp_last_step.is_(None), User.totp_last_step < step)
    statement = update(User).where(User.id == user_id, unused).returning(User.id)
    confirmed = {"totp_confirmed_at": func.now()} if confirm else {}
    return await session.scalar(statement.values(totp_last_step=step, **confirmed)) is not None


async def belongs_elsewhere(session: AsyncSession, user_id: UUID, tenant_id: UUID) -> bool:
    """Whether the account is an operator's, or a member of another tenant too."""
    other = select(Membership.user_id).where(Membership.user_id == user_id, Membership.tenant_id != tenant_id)
    query = select(User.id).where(User.id == user_id, or_(User.is_operator, other.exists()))
    return await session.scalar(query) is not None


async def _credentials(session: AsyncSession, condition: ColumnElement[bool]) -> Credentials | None:
    row = (await session.execute(select(*_CREDENTIALS).where(condition))).one_or_none()
    return None if row is None else Credentials(**row._mapping)


def _address(email: str) -> str | None:
    """Return an address as accounts have it; None for a text that is none."""
    address = email.strip().lower()
    return address if is_name(address, EMAIL) else None
