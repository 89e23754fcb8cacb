"""The fingerprint of the server secret, what the secret has sealed, and the acceptance of another one, which voids that: people
and receivers set it up again.

Invariant: one start at a time compares and writes the fingerprint: the lock of `fingerprint` lasts until the commit.
"""

from dataclasses import asdict, dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Delete, Update, delete, exists, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.database import lock, writing
from loraplex.tenants.models import (
    Gateway,
    IdempotencyRecord,
    Installation,
    RecoveryCode,
    User,
    WebhookEndpoint,
)
from loraplex.tenants.unit_of_work import UnitOfWork

VOID: Final = b""
"""In place of sealed bytes: no secret opens it, so that what needs it is refused until it is set up again."""
TRIED: Final = 100
"""So many newest secrets of each kind show by which server secret they were sealed."""


@dataclass(frozen=True, slots=True)
class Voided:
    """How many of each were voided."""

    webhook_secrets: int
    second_factors: int
    recovery_codes: int
    stored_responses: int


class InstallationRepository:
    """The one row of the installation, seen by a session of the operator's role."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def fingerprint(self) -> bytes | None:
        """Return the fingerprint; None where no secret is known. Other starts wait until this transaction ends."""
        await lock(self._session, "installation")
        return await self._session.scalar(select(Installation.secret_fingerprint))

    async def recognize(self, fingerprint: bytes) -> None:
        """Write the fingerprint, in place of another one."""
        values = {"secret_fingerprint": fingerprint, "recognized_since": func.now()}
        row = insert(Installation).values(**values)
        await self._session.execute(
            row.on_conflict_do_update(index_elements=[Installation.is_only_row], set_=values)
        )

    async def is_sealed(self) -> bool:
        """Whether anything is stored that only the server secret opens."""
        async with writing(self._session):
            people = await self._session.scalar(
                select(or_(exists().where(User.totp_secret.is_not(None)), exists().select_from(RecoveryCode)))
            )
        return bool(people or await self._session.scalar(select(exists().select_from(WebhookEndpoint))))

    async def has_gateways(self, live_s: float) -> bool:
        """Whether any gateway was seen within `live_s`."""
        since = func.now() - func.make_interval(0, 0, 0, 0, 0, 0, live_s)
        return bool(await self._session.scalar(select(exists().where(Gateway.seen_at > since))))

    async def newest_sealed(self) -> tuple[list[tuple[UUID, UUID, bytes]], list[tuple[UUID, bytes]]]:
        """Return the newest sealed secrets: of webhooks, by tenant and endpoint, and of second factors, by person."""
        columns = (WebhookEndpoint.tenant_id, WebhookEndpoint.id, WebhookEndpoint.encrypted_secret)
        endpoints = select(*columns).order_by(WebhookEndpoint.id.desc()).limit(TRIED)
        webhooks = [(tenant, id, sealed) for tenant, id, sealed in await self._session.execute(endpoints)]
        people = select(User.id, User.totp_secret).where(User.totp_secret.is_not(None))
        async with writing(self._session):
            found = await self._session.execute(people.order_by(User.id.desc()).limit(TRIED))
        return webhooks, [(id, sealed) for id, sealed in found if sealed is not None]

    async def void_sealed(self) -> Voided:
        """Void everything that only another secret would open.

        A second factor stays asked for, and no code of it works. A stored response stays, so that its request is not run again.
        """
        endpoints = update(WebhookEndpoint).values(
            encrypted_secret=VOID, previous_secret=None, previous_secret_until=None
        )
        responses = update(IdempotencyRecord).where(IdempotencyRecord.sealed_answer.is_not(None))
        webhooks = await self._count(endpoints)
        stored = await self._count(responses.values(sealed_answer=VOID))
        async with writing(self._session):
            confirmed = User.totp_confirmed_at.is_not(None)
            second_factors = await self._count(update(User).where(confirmed).values(totp_secret=VOID))
            begun = update(User).where(User.totp_confirmed_at.is_(None), User.totp_secret.is_not(None))
            await self._count(begun.values(totp_secret=None))
            codes = await self._count(delete(RecoveryCode))
        return Voided(webhooks, second_factors, codes, stored)

    async def _count(self, statement: Update | Delete) -> int:
        result: Any = await self._session.execute(statement, execution_options={"synchronize_session": False})
        return int(result.rowcount)


async def accept_secret(uow: UnitOfWork, fingerprint: bytes) -> Voided:
    """Void what the secret before sealed, and recognize the secret of this fingerprint from now on."""
    installation = InstallationRepository(uow.session)
    before = await installation.fingerprint()
    voided = await installation.void_sealed()
    await installation.recognize(fingerprint)
    seen = None if before is None else {"fingerprint": before.hex()}
    after = {"fingerprint": fingerprint.hex(), **asdict(voided)}
    await uow.audit.record("installation.accept_secret", "installation", seen, after)
    return voided
