"""Keys: `/console/keys`. Invariant: the text of a new key is in the one response to its form, which no cache keeps."""

from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter
from pydantic import BaseModel, Field, field_validator, model_validator
from starlette.responses import Response

from loraplex.platform.web.console.addresses import link, query_form
from loraplex.platform.web.console.form_routes import FormSubmission, form_page, submits
from loraplex.platform.web.console.forms import Entered
from loraplex.platform.web.console.page import PageRequest, opens
from loraplex.platform.web.keys import queries
from loraplex.platform.web.keys.queries import KEY_ORDER, ShownKey
from loraplex.platform.web.limits import queries as limits
from loraplex.platform.web.limits.limit_fields import LimitFields
from loraplex.tenants.api_keys import use_cases as api_keys
from loraplex.tenants.api_keys.records import KEY_STATES, MAX_GRACE_SECONDS, KeyChange
from loraplex.tenants.api_keys.use_cases import Member
from loraplex.tenants.people.roles import ROLE_SCOPES
from loraplex.tenants.quotas import use_cases as quotas
from loraplex.tenants.quotas.limits import COUNTED
from loraplex.tenants.scopes import (
    ADAPTERS_READ,
    ADAPTERS_WRITE,
    BILLING_READ,
    INFERENCE,
    KEYS_WRITE,
    TENANT_ADMIN,
    USAGE_READ,
)

Manager = Annotated[PageRequest, opens(KEYS_WRITE)]
Submission = Annotated[FormSubmission, submits(KEYS_WRITE)]
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
CUSTOM: Final = "custom"
PRESETS: Final = {
    "application": ("Application: asks models", frozenset({INFERENCE})),
    "developer": (
        "Developer: asks models, uploads adapters, manages keys, reads usage",
        ROLE_SCOPES["developer"],
    ),
    "reporting": ("Reporting: reads usage, bills and credits", ROLE_SCOPES["billing"]),
    "reader": ("Read only: looks at adapters and usage", ROLE_SCOPES["viewer"]),
}
"""What a key is for -> the words of the form, and its scopes."""
MEANINGS: Final = {
    INFERENCE: "ask models, and count tokens",
    ADAPTERS_READ: "see adapters, their versions, aliases and evaluations",
    ADAPTERS_WRITE: "upload and delete adapters, move aliases, evaluate",
    KEYS_WRITE: "manage keys that have no more scopes than this one",
    USAGE_READ: "see usage, requests and limits",
    BILLING_READ: "see prices, credits, invoices and webhooks",
    TENANT_ADMIN: "all of these, and people, webhooks, the data policy and the audit log",
}
FIELDS: Final = ("name", "scopes", "allowed_cidrs", "expires_at")

router = APIRouter()


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

    @property
    def bounds(self) -> KeyChange:
        """Its expiry and networks, both as they were typed."""
        return {"expires_at": self.expires_at, "allowed_cidrs": self.networks}


class NewKeyForm(KeyForm, LimitFields):
    """A key and the limits that it begins with. `preset`: one of `PRESETS` in place of `scopes`, or `custom`.

    A browser without `:has` shows the scopes beside a preset: others than the preset's, or those ticked at first, are refused.
    """

    preset: str = CUSTOM

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, values: dict[str, Any]) -> dict[str, Any]:
        label, scopes = PRESETS.get(values.get("preset", CUSTOM), ("", None))
        if scopes is None:
            return values
        if {*values["scopes"]} not in (set(), {INFERENCE}, {*scopes}):
            raise ValueError(f"Choose Custom for the ticked scopes, or tick {INFERENCE} alone for {label}.")
        return {**values, "scopes": [*scopes]}


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


async def new_form(page: Manager) -> dict[str, object]:
    """Return what the form of a new key shows."""
    bounds = await page.query(limits.bounds, page.tenant_id)
    return {
        "presets": preset_options(page),
        "scopes": scope_options(page),
        "bounds": bounds,
        "currency": page.currency,
    }


async def key_form(page: Manager, key_id: str) -> dict[str, object]:
    """Return what forms about a key show. Raises `KeyNotFound`."""
    key = await page.query(queries.key, page.tenant_id, key_id)
    return {
        "key": key,
        "lacking": lacking_scope(page, key),
        "scopes": scope_options(page),
        "graces": GRACES,
    }


# `new` is no id of a key.
@form_page(router, f"{LIST}/new", "keys/new.html", new_form, fields=(*FIELDS, *COUNTED), is_page=True)
async def create_key(submission: Submission) -> Response:
    values = submission.parse(NewKeyForm)
    bounds = await submission.query(limits.bounds, submission.tenant_id)
    values.require_within(bounds, submission.currency)
    made = await submission.result(
        quotas.create_limited_key,
        authority_of(submission),
        values.name,
        values.scopes,
        values.bounds,
        values.limits,
    )
    return submission.dialog("keys/secret.html", made=made, replaces=None)


@router.get(LIST)
async def list_keys(page: Manager, state: str = "") -> Response:
    wanted = next((each for each in KEY_STATES if each == state), None)
    search, part = query_form(page.http).text("name"), page.part(KEY_ORDER)
    found = page.rows(part, await page.query(queries.keys, page.tenant_id, wanted, part, search))
    links = {each: link(LIST, {"state": each, "name": search}) for each in ("", *KEY_STATES)}
    return page.show("keys/list.html", keys=found, state=wanted, form=Entered({"name": search}), links=links)


@router.get(ONE)
async def show_key(page: Manager, key_id: str) -> Response:
    tenant_id, now, currency = page.tenant_id, datetime.now(UTC), page.currency
    sees_use = USAGE_READ in page.session.scopes
    async with page.reading() as session:
        key = await queries.key(session, tenant_id, key_id)
        days = await queries.days_of_use(session, tenant_id, key_id, currency, now) if sees_use else {}
        stored = await limits.stored_of_key(session, tenant_id, key_id)
    has_limits = any(subject.limits for subject in stored.subjects)
    controller = page.dependencies.admission_controller
    counted = await limits.with_use(controller, tenant_id, stored) if has_limits else None
    own, *groups = counted or stored.subjects
    return page.show(
        "keys/key.html",
        key=key,
        limits=own.limits,
        groups=groups,
        days=days,
        is_counted=counted is not None,
        currency=currency,
        lacking=lacking_scope(page, key),
    )


@form_page(router, f"{ONE}/edit", "keys/edit.html", key_form, fields=FIELDS)
async def change_key(submission: Submission, key_id: str) -> Response:
    values = submission.parse(KeyForm)
    changes: KeyChange = {"name": values.name, "scopes": values.scopes, **values.bounds}
    await submission.run(api_keys.change, authority_of(submission), key_id, changes, seen=submission.revision)
    return submission.back(f"{LIST}/{key_id}", f"Key {values.name} was changed.")


@form_page(router, f"{ONE}/rotate", "keys/rotate.html", key_form, fields=("grace", "hours"))
async def rotate_key(submission: Submission, key_id: str) -> Response:
    grace_s = submission.parse(RotateForm).seconds
    made = await submission.result(api_keys.rotate, authority_of(submission), key_id, grace_s)
    return submission.dialog("keys/secret.html", made=made, replaces=key_id)


@form_page(router, f"{ONE}/revoke", "keys/revoke.html", key_form)
async def revoke_key(submission: Submission, key_id: str) -> Response:
    end_running = bool(submission.form.text("end_running"))
    ended = await submission.result(
        api_keys.revoke, authority_of(submission), key_id, end_running=end_running
    )
    return submission.back(LIST, f"Key {ended.name} is revoked: its next request is refused with 401.")


def authority_of(page: PageRequest) -> Member:
    """Return the right of the page's person over the keys of its tenant."""
    return Member(page.tenant_id, page.session.scopes)


def scope_options(page: PageRequest) -> list[tuple[str, str, str]]:
    """Return all scopes as choices; one that the person lacks has the reason why it cannot be chosen."""
    held = page.session.scopes
    return [
        (scope, f"{scope}: {meaning}", "" if scope in held else "your role cannot grant it")
        for scope, meaning in MEANINGS.items()
    ]


def preset_options(page: PageRequest) -> list[tuple[str, str, str]]:
    """Return what a key may be for, as `scope_options` does; the last choice are scopes one by one."""
    held = page.session.scopes
    own = [
        (name, label, "" if held >= scopes else "your role cannot grant all of it")
        for name, (label, scopes) in PRESETS.items()
    ]
    return [*own, (CUSTOM, "Custom: choose scopes", "")]


def lacking_scope(page: PageRequest, key: ShownKey) -> str | None:
    """Return a scope of the key that the person lacks: then the person may not change the key."""
    return next((scope for scope in key.scopes if scope not in page.session.scopes), None)
