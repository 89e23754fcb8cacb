"""Aliases of an adapter: split, move, roll back, delete. Below `/console/adapters/{name}/aliases`.

Invariant: a form carries the generation that its author has read; an alias that moved meanwhile is not overwritten, and one with a
gate moves through it.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from uuid import UUID

from fastapi import APIRouter
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.web.adapters import adapter_queries as detail
from loraplex.platform.web.adapters.adapter_queries import AdapterDetail
from loraplex.platform.web.adapters.alias_routes import Override
from loraplex.platform.web.adapters.pages import ONE, Submission, Writer
from loraplex.platform.web.console.addresses import path_of, query_form
from loraplex.platform.web.console.cookies import Undo
from loraplex.platform.web.console.form_routes import FormSubmission, form_page, revision_of, whole_number
from loraplex.platform.web.console.forms import Form, FormInvalid
from loraplex.platform.web.etags import ABSENT
from loraplex.tenants.administration import gated_aliases
from loraplex.tenants.administration.gated_aliases import GateOverride
from loraplex.tenants.canaries.records import GuardBounds
from loraplex.tenants.errors import AliasMoved, AliasNotFound, GateFailed
from loraplex.tenants.registry import queries
from loraplex.tenants.registry import use_cases as aliases
from loraplex.tenants.registry.records import WHOLE, AliasDocument

ALIAS: Final = f"{ONE}/aliases/{{alias}}"
NEW: Final = f"{ONE}/aliases/new"
MOVED: Final = "moved"
"""Where a form shows that the alias was moved meanwhile."""
GATE: Final = "gate"
"""Where it shows why the gate refuses the move; `report` has the id of the evaluation that says so, or `unevaluated` the version
that has none."""
REFUSALS: Final = (MOVED, GATE, "report", "unevaluated")
FIELDS: Final = ("alias", *REFUSALS, "reason", *GuardBounds.model_fields)

router = APIRouter()


@router.get(f"{ALIAS}/split")
async def draft_split(page: Writer, name: str, alias: str, generation: int = ABSENT) -> Response:
    """The box of an alias with several targets as it was changed: its button names the change."""
    shown = await page.query(detail.adapter, page.tenant_id, name)
    used = next((each for each in shown.aliases if each.record.alias == alias), None)
    return page.show(
        "adapters/split.html",
        adapter=shown.record,
        used=used,
        shares={} if used is None else drafted(query_form(page.http), used.record),
        generation=generation,
        can_write=True,
    )


async def new_form(page: Writer, name: str) -> dict[str, object]:
    """Return what the form of a new alias shows. Raises `AdapterNotFound`."""
    return await alias_form(page, name, "")


async def alias_form(page: Writer, name: str, alias: str) -> dict[str, object]:
    """Return what forms about an alias show; `alias` is None if there is none of the name. Raises `AdapterNotFound`."""
    shown = await page.query(detail.adapter, page.tenant_id, name)
    present = next((each.record for each in shown.aliases if each.record.alias == alias), None)
    shares = _shares(shown, present, query_form(page.http).text("version"))
    return {"adapter": shown.record, "detail": shown, "alias": present, "shares": shares}


@form_page(router, NEW, "adapters/move.html", new_form, fields=FIELDS)
async def create_alias(submission: Submission, name: str) -> Response:
    alias = submission.form.text("alias")
    if not alias:
        raise FormInvalid({"alias": "Enter a value."})
    return await _move(submission, name, alias, ABSENT)


@form_page(router, f"{ALIAS}/move", "adapters/move.html", alias_form, fields=FIELDS)
async def move_alias(submission: Submission, name: str, alias: str) -> Response:
    return await _move(submission, name, alias, _generation(submission))


async def _move(submission: FormSubmission, name: str, alias: str, seen: int | None) -> Response:
    """Move an alias to the shares of the form, with its guard unless one version gets all; for a reason, past the gate."""
    form, targets = submission.form, targets_of(submission.form)
    past = submission.parse(Override) if form.text("reason") else None
    async with _explaining_refusal(submission, name, alias):
        moved = await submission.result(
            gated_aliases.move,
            submission.tenant_id,
            name,
            alias,
            targets,
            guard=submission.parse(GuardBounds) if form.text("guarded") and len(targets) > 1 else None,
            seen=seen,
            override=None if past is None else GateOverride(past.reason, submission.session.scopes),
            fingerprint=submission.dependencies.engine.info().system_fingerprint,
        )
    return _back(submission, moved)


@form_page(router, f"{ALIAS}/rollback", "adapters/rollback.html", alias_form, fields=REFUSALS)
async def roll_back(submission: Submission, name: str, alias: str) -> Response:
    async with _explaining_refusal(submission, name, alias):
        moved = await submission.result(
            gated_aliases.roll_back,
            submission.tenant_id,
            name,
            alias,
            seen=_generation(submission),
            fingerprint=submission.dependencies.engine.info().system_fingerprint,
        )
    return _back(submission, moved)


@form_page(router, f"{ALIAS}/delete", "adapters/delete_alias.html", alias_form, fields=REFUSALS)
async def delete_alias(submission: Submission, name: str, alias: str) -> Response:
    async with _explaining_refusal(submission, name, alias):
        await submission.run(aliases.delete, submission.tenant_id, name, alias, seen=_generation(submission))
    return submission.back(path_of("adapters", name), f"{name}:{alias} is deleted.")


@asynccontextmanager
async def _explaining_refusal(submission: FormSubmission, name: str, alias: str) -> AsyncIterator[None]:
    """Raise `FormInvalid`, which names who moved the alias to what if it moved meanwhile, or the report that its gate refuses."""
    try:
        yield
    except AliasMoved as error:
        message = await submission.query(_whereto, submission.tenant_id, name, alias)
        raise FormInvalid({MOVED: message}) from error
    except GateFailed as error:
        place = "unevaluated" if error.evaluation is None else "report"
        raise FormInvalid({GATE: f"{error}.", place: str(error.evaluation or error.version)}) from error


async def _whereto(session: AsyncSession, tenant_id: UUID, name: str, alias: str) -> str:
    """Say who moved an alias last, and where it leads now."""
    author = await detail.alias_author(session, tenant_id, name, alias)
    try:
        now = leads(await queries.alias(session, tenant_id, name, alias)).removesuffix(".")
    except AliasNotFound:
        now = f"{name}:{alias} does not exist now"
    by = f" by {author}" if author else ""
    return f"The alias was moved{by} while you looked: {now}. Nothing was changed."


def _generation(submission: FormSubmission) -> int | None:
    return revision_of(submission.form, "generation")


def _back(submission: FormSubmission, moved: AliasDocument) -> Response:
    """Go back to the adapter's page, which says where the alias leads now and offers to undo it."""
    undo = None if moved.previous is None else Undo(moved.name, moved.alias, moved.revision)
    return submission.back(path_of("adapters", moved.name), leads(moved), undo)


def targets_of(form: Form) -> dict[int, int]:
    """Return version -> weight. `share-N` is the weight of version N; `first` that of the version `older`, and `newer` has the
    rest. Raises `FormInvalid`.
    """
    if form.text("first"):
        older, newer, first = (_number(form, each) for each in ("older", "newer", "first"))
        shares = {older: first, newer: WHOLE - first}
    else:
        names = [name for name in form.fields if name.startswith("share-") and form.text(name)]
        shares = {_version(name): _number(form, name) for name in names}
    targets = {version: weight for version, weight in shares.items() if weight}
    if sum(targets.values()) != WHOLE or min(targets.values()) < 0:
        raise FormInvalid({"": f"The shares sum to {sum(targets.values())}, not to 100."})
    return targets


def drafted(form: Form, alias: AliasDocument) -> dict[int, int]:
    """Return the share of each target of an alias as a form has it, from 0 to 100; as it is where the form has none."""
    targets = alias.targets
    if len(targets) == 2:
        older, newer = sorted(targets)
        first = _percent(form.text("first"), targets[older])
        return {older: first, newer: WHOLE - first}
    return {version: _percent(form.text(f"share-{version}"), weight) for version, weight in targets.items()}


def leads(alias: AliasDocument) -> str:
    """Say where an alias leads to now."""
    name = f"{alias.name}:{alias.alias}"
    if alias.version is not None:
        return f"{name} leads to v{alias.version} for every request."
    parts = [f"v{share.version} for {share.weight} %" for share in alias.split]
    return f"{name} leads to {', '.join(parts)} of its requests."


def _shares(shown: AdapterDetail, alias: AliasDocument | None, version: str) -> list[tuple[int, int]]:
    """Return the versions that an alias may lead to, newest first, with their shares as the form begins: all requests at
    `version`, if that is one of them.
    """
    ready = [each.record.version for each in shown.versions if each.record.state == "ready"]
    present = {} if alias is None else alias.targets
    asked = next((each for each in ready if str(each) == version), None)
    if asked is not None or (not present and ready):
        present = {ready[0] if asked is None else asked: WHOLE}
    return [(each, present.get(each, 0)) for each in ready]


def _percent(text: str, default: int) -> int:
    number = whole_number(text, beyond=WHOLE)
    return default if number is None else min(number, WHOLE)


def _number(form: Form, name: str) -> int:
    text = form.text(name)
    number = whole_number(text)
    if number is None:
        raise FormInvalid({"": f"“{text[:20]}” is no whole number."})
    return number


def _version(field: str) -> int:
    number = field.removeprefix("share-")
    version = whole_number(number)
    if version is None:
        raise FormInvalid({"": f"“{number[:20]}” is no version."})
    return version
