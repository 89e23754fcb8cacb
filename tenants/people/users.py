"""Accounts of people. Invariant: an address has at most one account, and secrets are read by the gateway's role alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID, uuid4

from sqlalchemy import ColumnElement, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import NameTaken, UserNotFound
from loraplex.tenants.models import Membership, User
from loraplex.tenants.names import EMAIL, check_email, check_person_name, is_name
from loraplex.tenants.people.recovery_code_rows import RecoveryCodeRepository


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


class UserRepository:
    """Accounts, seen by an operator's session."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def create(self, email: str, name: str, password_hash: str | None) -> UUID:
        """Create an account and return its id. Raises `InvalidName`, `NameTaken`."""
        address = check_email(email)
        if await self.by_email(address) is not None:
            raise NameTaken(f"an account with the address {address} exists already")
        user_id = uuid4()
        values = {"id": user_id, "email": address, "name": check_person_name(name)}
        await self._session.execute(insert(User).values(**values, password_hash=password_hash))
        return user_id

    async def by_email(self, email: str) -> User | None:
        """Return the account of an address, if there is one."""
        address = email.strip().lower()
        if not is_name(address, EMAIL):
            return None
        found = await self._session.scalars(select(User).where(User.email == address))
        return found.one_or_none()

    async def get(self, email: str) -> User:
        """Raises `UserNotFound`."""
        user = await self.by_email(email)
        if user is None:
            raise UserNotFound(f"no account with the address {email[:100]!r}")
        return user

    async def by_id(self, user_id: UUID) -> User:
        """Raises `UserNotFound`. A tenant finds its members only."""
        user = await self._session.get(User, user_id)
        if user is None:
            raise UserNotFound("no such person")
        return user

    async def list(self) -> Sequence[User]:
        """All accounts, by address."""
        return (await self._session.scalars(select(User).order_by(User.email))).all()

    async def has_operator(self) -> bool:
        """Whether a person is an operator and may sign in."""
        query = select(User.id).where(User.is_operator, User.disabled_at.is_(None)).limit(1)
        return await self._session.scalar(query) is not None

    async def set_operator(self, user_id: UUID, is_operator: bool) -> None:
        """Grant or take the operator's rights."""
        await self._change(user_id, is_operator=is_operator)

    async def set_disabled(self, user_id: UUID, disabled: bool) -> None:
        """Let a person sign in no longer, or again."""
        await self._change(user_id, disabled_at=datetime.now(UTC) if disabled else None)

    async def _change(self, user_id: UUID, **values: object) -> None:
        await self._session.execute(update(User).where(User.id == user_id).values(**values))


class CredentialRepository:
    """Secrets of accounts, seen by a session of the gateway's role (`as_writer`, `writing`)."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def by_email(self, email: str) -> Credentials | None:
        """Return the credentials of an address; None without an account."""
        address = email.strip().lower()
        return await self._one(User.email == address) if is_name(address, EMAIL) else None

    async def by_id(self, user_id: UUID) -> Credentials:
        """Raises `UserNotFound`."""
        found = await self._one(User.id == user_id)
        if found is None:
            raise UserNotFound("no such person")
        return found

    async def by_identity(self, issuer: str, subject: str) -> Credentials | None:
        """Return the credentials linked to an identity of an identity provider."""
        return await self._one((User.oidc_issuer == issuer) & (User.oidc_subject == subject))

    async def link_identity(self, user_id: UUID, issuer: str, subject: str) -> bool:
        """Link an account to its identity; False if it has another one."""
        unlinked = or_(
            User.oidc_issuer.is_(None), (User.oidc_issuer == issuer) & (User.oidc_subject == subject)
        )
        statement = update(User).where(User.id == user_id, unlinked).returning(User.id)
        return (
            await self._session.scalar(statement.values(oidc_issuer=issuer, oidc_subject=subject)) is not None
        )

    async def has_identity(self, user_id: UUID) -> bool:
        """Whether an account is linked to an identity."""
        query = select(User.id).where(User.id == user_id, User.oidc_issuer.is_not(None))
        return await self._session.scalar(query) is not None

    async def set_password(self, user_id: UUID, password_hash: str | None) -> None:
        """Replace the password; None removes it."""
        await self._change(user_id, password_hash=password_hash)

    async def set_second_factor(self, user_id: UUID, encrypted: bytes | None) -> None:
        """Store a new TOTP secret, which counts when it is confirmed; None removes the second factor. Recovery codes end."""
        await RecoveryCodeRepository(self._session).replace(user_id, ())
        await self._change(user_id, totp_secret=encrypted, totp_confirmed_at=None, totp_last_step=None)

    async def use_step(self, user_id: UUID, step: int, *, confirm: bool = False) -> bool:
        """Use the code of a time step; False if that one or a later one was used. `confirm`: the secret counts from now on."""
        unused = or_(User.totp_last_step.is_(None), User.totp_last_step < step)
        statement = update(User).where(User.id == user_id, unused).returning(User.id)
        values: dict[str, object] = {"totp_last_step": step}
        if confirm:
            values["totp_confirmed_at"] = func.now()
        return await self._session.scalar(statement.values(**values)) is not None

    async def seen(self, user_id: UUID, now: datetime) -> None:
        """Store when the person was last seen."""
        await self._change(user_id, last_seen_at=now)

    async def belongs_elsewhere(self, user_id: UUID, tenant_id: UUID) -> bool:
        """Whether the account is an operator's, or a member of another tenant too."""
        other = select(Membership.user_id).where(
            Membership.user_id == user_id, Membership.tenant_id != tenant_id
        )
        query = select(User.id).where(User.id == user_id, or_(User.is_operator, other.exists()))
        return await self._session.scalar(query) is not None

    async def _one(self, condition: ColumnElement[bool]) -> Credentials | None:
        row = (await self._session.execute(select(*_CREDENTIALS).where(condition))).one_or_none()
        return None if row is None else Credentials(**row._mapping)

    async def _change(self, user_id: UUID, **values: object) -> None:
        await self._session.execute(update(User).where(User.id == user_id).values(**values))
