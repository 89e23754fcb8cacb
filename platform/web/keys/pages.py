"""Keys: `/console/keys`. Invariant: the text of a new key is in the one response to its form, which no cache keeps."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field, field_validator
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.services import api_keys, quotas
from loraplex.platform.services.api_keys import KeyAuthority, member_keys
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.form_routes import revision_of
from loraplex.platform.web.console.forms import parse
from loraplex.platform.web.console.legacy_forms import Sent, add_form, tenant_of
from loraplex.platform.web.keys import queries
from loraplex.platform.web.keys.queries import (
    ALL_SCOPES,
    MAX_GRACE_SECONDS,
    DayOfUse,
    Key,
    KeyState,
)
from loraplex.platform.web.limits import queries as limits
from loraplex.platform.web.limits.limit_fields import LIMIT_NAMES, Bounds, LimitFields
from loraplex.platform.web.limits.queries import Limits, StoredLimits
from loraplex.tenants.unit_of_work import UnitOfWork

LIST: Final = "/console/keys"
ONE: Final = f"{LIST}/{{key_id}}"
HOUR_S: Final = 3600
GRACES: Final = (
    ("0", "None: the old key ends now"),
    (str(HOUR_S), "1 hour"),
    (str(24 * HOUR_S), "24 hours"),
    (str(7 * 24 * HOUR_S), "7 days"),
    ("other", "Another number of hours"),
)
FIELDS: Final = ("name", "scopes", "allowed_cidrs", "expires_at")


class KeyForm(BaseModel):
    """`allowed_cidrs`: networks with commas; `expires_at` in UTC."""

    name: str
    scopes: list[str] = Field(min_length=1)
    allowed_cidrs: str = ""
    expires_at: datetime | None = None

    @field_validator("expires_at")
    @classmethod
    def _utc(cls, value: datetime | None) -> datetime | None:
        return value if value is None or value.tzinfo is not None else value.replace(tzinfo=UTC)

    @property
    def networks(self) -> list[str]:
        """The networks one by one."""
        return [network.strip() for network in self.allowed_cidrs.split(",") if network.strip()]


class NewKeyForm(KeyForm, LimitFields):
    """A key and the limits that it begins with."""


class RotateForm(BaseModel):
    """`grace`: seconds, or `other` for `hours`."""

    grace: str = "0"
    hours: int = Field(default=1, ge=0, le=MAX_GRACE_SECONDS // HOUR_S)

    @field_validator("grace")
    @classmethod
    def _offered(cls, value: str) -> str:
        if value not in dict(GRACES):
            raise ValueError("Choose one of the times.")
        return value

    @property
    def seconds(self) -> int:
        return self.hours * HOUR_S if self.grace == "other" else int(self.grace)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """A key that was just made. `replaces`: the name of the public id that it replaced, None for a key of its own."""

    id: str
    name: str
    plaintext: str
    replaces: str | None = None


def keys_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of the pages of keys."""
    router = APIRouter()
    writer = Depends(endpoint.requires("keys:write"))
    _add_list(router, endpoint, writer)
    _add_creation(router, endpoint, writer)
    _add_key(router, endpoint, writer)
    _add_edit(router, endpoint, writer)
    _add_rotation(router, endpoint, writer)
    _add_revocation(router, endpoint, writer)
    return router


def _add_list(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    @router.get(LIST)
    async def list_keys(
        request: Request, session: Annotated[ConsoleSession, writer], state: str = "", before: str = ""
    ) -> Response:
        wanted: KeyState | None = next((each for each in get_args(KeyState) if each == state), None)
        page = await endpoint.query(
            session, lambda found: queries.key_page(found, tenant_of(session), wanted, before)
        )
        query = {"state": wanted} if wanted else {}
        older = None if page.older is None else f"{LIST}?{urlencode({**query, 'before': page.older})}"
        newest = f"{LIST}?{urlencode(query)}" if before else None
        return endpoint.page(
            *(request, session, "keys/list.html"),
            keys=page.keys,
            state=wanted,
            states=queries.STATES,
            older=older,
            newest=newest,
        )


def _add_creation(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    async def create_key(sent: Sent) -> Response:
        session, asked = sent.session, parse(sent.form, NewKeyForm)
        asked.require_within(await find_bounds(endpoint, session), currency_of(endpoint, session))

        async def work(uow: UnitOfWork) -> NewKey:
            keys, tenant_id = keys_of(uow, session), tenant_of(session)
            issued = await api_keys.create(
                uow,
                keys,
                asked.name,
                asked.scopes,
                {"expires_at": asked.expires_at, "allowed_cidrs": asked.networks},
            )
            if asked.limits != Limits():
                await quotas.limit_key(uow, tenant_id, issued.record.key_id, asked.limits, authority=keys)
            return NewKey(id=issued.record.key_id, name=issued.record.name, plaintext=issued.plaintext)

        made = await sent.perform(work, NewKey)
        return sent.show_once("keys/secret.html", made)

    add_form(
        *(router, f"{LIST}/new", endpoint),
        access=writer,
        template="keys/new.html",
        find=new_key,
        send=create_key,
        fields=(*FIELDS, *LIMIT_NAMES),
        is_page=True,
    )


def _add_key(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    @router.get(ONE)
    async def show_key(key_id: str, request: Request, session: Annotated[ConsoleSession, writer]) -> Response:
        tenant_id, now, currency = tenant_of(session), datetime.now(UTC), currency_of(endpoint, session)
        sees_use = "usage:read" in session.scopes

        async def read(found: AsyncSession) -> tuple[Key, StoredLimits, list[DayOfUse]]:
            key = await queries.key(found, tenant_id, key_id)
            days = await queries.days_of_use(found, tenant_id, key_id, currency, now) if sees_use else []
            return key, await limits.stored_of_key(found, tenant_id, key_id), days

        key, stored, days = await endpoint.query(session, read)
        controller = endpoint.dependencies.admission_controller
        has_limits = any(subject.limits for subject in stored.subjects)
        counted = await limits.with_use(controller, tenant_id, stored) if has_limits else None
        own, *groups = counted or stored.subjects
        return endpoint.page(
            *(request, session, "keys/key.html"),
            key=key,
            limits=own.limits,
            groups=groups,
            days=days,
            is_counted=counted is not None,
            currency=currency,
            lacking=lacking_scope(session, key),
        )


def _add_edit(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    async def change_key(sent: Sent) -> Response:
        key_id, asked = sent.named("key_id"), parse(sent.form, KeyForm)

        async def work(uow: UnitOfWork) -> None:
            await api_keys.change(
                uow,
                keys_of(uow, sent.session),
                key_id,
                {
                    "name": asked.name,
                    "scopes": asked.scopes,
                    "allowed_cidrs": asked.networks,
                    "expires_at": asked.expires_at,
                },
                seen=revision_of(sent.form),
            )

        await sent.perform(work)
        return sent.back(f"{LIST}/{key_id}", f"Key {asked.name} was changed.")

    add_form(
        *(router, f"{ONE}/edit", endpoint),
        access=writer,
        template="keys/edit.html",
        find=asked_about,
        send=change_key,
        fields=FIELDS,
    )


def _add_rotation(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    async def rotate_key(sent: Sent) -> Response:
        key_id, asked = sent.named("key_id"), parse(sent.form, RotateForm)

        async def work(uow: UnitOfWork) -> NewKey:
            issued = await api_keys.rotate(uow, keys_of(uow, sent.session), key_id, asked.seconds)
            return NewKey(
                id=issued.record.key_id, name=issued.record.name, plaintext=issued.plaintext, replaces=key_id
            )

        made = await sent.perform(work, NewKey)
        return sent.show_once("keys/secret.html", made)

    add_form(
        *(router, f"{ONE}/rotate", endpoint),
        access=writer,
        template="keys/rotate.html",
        find=asked_about,
        send=rotate_key,
        fields=("grace", "hours"),
        graces=GRACES,
    )


def _add_revocation(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    async def revoke_key(sent: Sent) -> Response:
        async def work(uow: UnitOfWork) -> str:
            keys = keys_of(uow, sent.session)
            return (await api_keys.revoke(uow, keys, sent.named("key_id"), end_running=end_running)).name

        end_running = bool(sent.form.text("end_running"))
        name = await sent.perform(work, str)
        toast = f"Key {name} is revoked: its next request is refused with 401."
        return sent.back(LIST, toast)

    add_form(
        *(router, f"{ONE}/revoke", endpoint),
        access=writer,
        template="keys/revoke.html",
        find=asked_about,
        send=revoke_key,
    )


async def find_bounds(endpoint: ConsoleEndpoint, session: ConsoleSession) -> Bounds:
    """Return the limits of the tenant, which those of a key must not exceed."""
    return await endpoint.query(session, lambda found: limits.bounds(found, tenant_of(session)))


async def new_key(endpoint: ConsoleEndpoint, request: Request, session: ConsoleSession) -> dict[str, object]:
    """Return what the form of a new key shows."""
    return {
        "scopes": scope_options(session),
        "bounds": await find_bounds(endpoint, session),
        "currency": currency_of(endpoint, session),
    }


async def asked_about(
    endpoint: ConsoleEndpoint, request: Request, session: ConsoleSession
) -> dict[str, object]:
    """Return what forms about a key show. Raises `KeyNotFound`."""
    key_id = request.path_params["key_id"]
    key = await endpoint.query(session, lambda found: queries.key(found, tenant_of(session), key_id))
    return {"key": key, "lacking": lacking_scope(session, key), "scopes": scope_options(session)}


def keys_of(uow: UnitOfWork, session: ConsoleSession) -> KeyAuthority:
    """Return the right of the session's person over the keys of its tenant."""
    return member_keys(uow, tenant_of(session), session.scopes)


def currency_of(endpoint: ConsoleEndpoint, session: ConsoleSession) -> str:
    """Return the currency of the tenant's money."""
    return endpoint.dependencies.currency_of(tenant_of(session))


def scope_options(session: ConsoleSession) -> list[tuple[str, str, str]]:
    """Return all scopes as choices; one that the person lacks has the reason why it cannot be chosen."""
    return [
        (scope, scope, "" if scope in session.scopes else "your role cannot grant it") for scope in ALL_SCOPES
    ]


def lacking_scope(session: ConsoleSession, key: Key) -> str | None:
    """Return a scope of the key that the person lacks: then the person may not change the key."""
    return next((scope for scope in key.scopes if scope not in session.scopes), None)
