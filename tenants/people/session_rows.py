"""Sessions of the console, kept on the server.

Invariant: a session is found only while its person may be where it is: the account is enabled, the tenant is neither suspended
nor deleted, and the membership or the operator's right still exists.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import IPv4Address, IPv6Address
from typing import Any, Final
from uuid import UUID, uuid4

from sqlalchemy import ColumnElement, ScalarSelect, and_, delete, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import LinkNotValid, UserNotFound
from loraplex.tenants.models import Adapter, ApiKey, Membership, Tenant, User, UserSession
from loraplex.tenants.people.memberships import TenantOfPerson, tenants_as_json, tenants_from_json
from loraplex.tenants.people.tokens import new_token, token_digest

IDLE: Final = timedelta(hours=12)
"""The time without a request after which a session ends."""
ABSOLUTE: Final = timedelta(days=7)
"""The time after which a session ends in any case."""
MAX_AGENT_LENGTH: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSession:
    """A session that works. `tenant_id` None: the operator's area; `role` None there, and for an operator who looks in.

    `by_link_only`: the person has neither a password nor an identity of a provider. `adapters` and `keys`: how many adapters,
    and keys that work, the tenant has.
    """

    id: UUID
    user_id: UUID
    email: str
    name: str
    is_operator: bool
    by_link_only: bool
    tenant_id: UUID | None
    tenant_name: str | None
    role: str | None
    viewing: bool
    second_factor: bool
    created_at: datetime
    last_seen_at: datetime
    expires_at: datetime
    adapters: int
    keys: int
    tenants: list[TenantOfPerson]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSession:
    """What a session is made with. `expires_at`: its absolute end."""

    user_id: UUID
    tenant_id: UUID | None
    expires_at: datetime
    viewing: bool = False
    second_factor: bool = False
    address: str | None = None
    user_agent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOfPerson:
    """One of a person's sessions. `tenant_name` None: in the operator's area."""

    id: UUID
    tenant_name: str | None
    viewing: bool
    created_at: datetime
    last_seen_at: datetime
    expires_at: datetime
    address: IPv4Address | IPv6Address | None
    user_agent: str | None


class SessionRepository:
    """Sessions, seen by a session of the gateway's role (`as_writer`, `writing`)."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def create(self, new: NewSession) -> str:
        """Store a session and return its token, which is stored nowhere."""
        token = new_token()
        values = {name: getattr(new, name) for name in NewSession.__dataclass_fields__}
        values["user_agent"] = "".join(filter(str.isprintable, new.user_agent or ""))[:MAX_AGENT_LENGTH]
        await self._session.execute(
            insert(UserSession).values(**values, id=uuid4(), token_sha256=token_digest(token))
        )
        return token

    async def replace(
        self,
        old: UUID,
        tenant_id: UUID | None,
        *,
        viewing: bool = False,
        second_factor: bool | None = None,
        keep: bool = False,
    ) -> str:
        """Store a session like `old` with another token, tenant and rights, and end `old` unless `keep`. Both end absolutely at
        the same time. Returns the token. Raises `UserNotFound` when `old` has ended.
        """
        columns = (UserSession.user_id, UserSession.expires_at, UserSession.address, UserSession.user_agent)
        query = select(*columns, UserSession.second_factor).where(UserSession.id == old)
        row = (await self._session.execute(query.with_for_update())).one_or_none()
        if row is None:
            raise UserNotFound("this session has ended")
        values = dict(row._mapping) | {"tenant_id": tenant_id, "viewing": viewing}
        values["address"] = None if row.address is None else str(row.address)
        if second_factor is not None:
            values["second_factor"] = second_factor
        token = await self.create(NewSession(**values))
        if not keep:
            await end_session(self._session, old)
        return token

    async def find(self, token: str, now: datetime) -> FoundSession | None:
        """Return the session of a token if it works now."""
        try:
            digest = token_digest(token)
        except LinkNotValid:
            return None
        row = (await self._session.execute(_working(UserSession.token_sha256 == digest, now))).one_or_none()
        if row is None:
            return None
        return FoundSession(**{**row._mapping, "tenants": tenants_from_json(row.tenants)})

    async def touch(self, session_id: UUID, now: datetime) -> None:
        """Store when the session was last used."""
        await self._session.execute(
            update(UserSession).where(UserSession.id == session_id).values(last_seen_at=now)
        )

    async def of_person(self, user_id: UUID, now: datetime) -> Sequence[SessionOfPerson]:
        """Return a person's sessions in all tenants and areas, the one used last first."""
        columns = (
            *(UserSession.id, Tenant.name.label("tenant_name"), UserSession.viewing),
            *(UserSession.created_at, UserSession.last_seen_at, UserSession.expires_at),
            *(UserSession.address, UserSession.user_agent),
        )
        query = select(*columns).outerjoin(Tenant, Tenant.id == UserSession.tenant_id)
        open_ = (UserSession.user_id == user_id, UserSession.expires_at > now)
        idle = UserSession.last_seen_at > now - IDLE
        found = await self._session.execute(
            query.where(*open_, idle).order_by(UserSession.last_seen_at.desc())
        )
        return [SessionOfPerson(**row._mapping) for row in found]

    async def end_all(self, user_id: UUID, *, but: UUID | None = None) -> int:
        """End every session of a person, but one; return how many were ended."""
        conditions = [UserSession.user_id == user_id]
        if but is not None:
            conditions.append(UserSession.id != but)
        result: Any = await self._session.execute(delete(UserSession).where(*conditions))
        return int(result.rowcount)


async def end_session(session: AsyncSession, session_id: UUID) -> bool:
    """End one session that the role of `session` sees; False if there is none."""
    result: Any = await session.execute(delete(UserSession).where(UserSession.id == session_id))
    return bool(result.rowcount)


async def end_sessions_in(session: AsyncSession, tenant_id: UUID, user_id: UUID) -> int:
    """End the sessions of a person in one tenant; return how many were ended."""
    own = (UserSession.tenant_id == tenant_id, UserSession.user_id == user_id)
    result: Any = await session.execute(delete(UserSession).where(*own))
    return int(result.rowcount)


def _working(condition: ColumnElement[bool], now: datetime) -> Any:
    member = and_(Membership.tenant_id == UserSession.tenant_id, Membership.user_id == UserSession.user_id)
    may_enter = or_(
        and_(UserSession.tenant_id.is_(None), User.is_operator),
        and_(
            UserSession.tenant_id.is_not(None),
            Tenant.deleted_at.is_(None),
            Tenant.suspended_at.is_(None),
            or_(Membership.role.is_not(None), UserSession.viewing & User.is_operator),
        ),
    )
    columns = (
        *(UserSession.id, UserSession.user_id, UserSession.tenant_id, UserSession.viewing),
        *(
            UserSession.second_factor,
            UserSession.created_at,
            UserSession.last_seen_at,
            UserSession.expires_at,
        ),
        *(User.email, User.name, User.is_operator, Tenant.name.label("tenant_name"), Membership.role),
        and_(User.password_hash.is_(None), User.oidc_issuer.is_(None)).label("by_link_only"),
        *(_count(Adapter, Adapter.deleted_at.is_(None)).label("adapters"), _working_keys(now).label("keys")),
        tenants_as_json(UserSession.user_id).label("tenants"),
    )
    return (
        select(*columns)
        .join(User, User.id == UserSession.user_id)
        .outerjoin(Tenant, Tenant.id == UserSession.tenant_id)
        .outerjoin(Membership, member)
        .where(
            condition,
            User.disabled_at.is_(None),
            UserSession.expires_at > now,
            UserSession.last_seen_at > now - IDLE,
            may_enter,
        )
    )


def _count(of: type[Adapter] | type[ApiKey], *conditions: ColumnElement[bool]) -> ScalarSelect[int]:
    """Count the rows of the session's tenant: none in the operator's area."""
    query = select(func.count()).select_from(of).where(of.tenant_id == UserSession.tenant_id, *conditions)
    return query.correlate(UserSession).scalar_subquery()


def _working_keys(now: datetime) -> ScalarSelect[int]:
    expired = ApiKey.expires_at <= now
    return _count(ApiKey, ApiKey.kind == "key", ApiKey.revoked_at.is_(None), expired.is_not(True))
