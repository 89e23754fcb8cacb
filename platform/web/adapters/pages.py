"""Adapters: `/console/adapters`, and the page of one adapter with its versions, reports and residency."""

from difflib import get_close_matches
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.inference.decisions.wording import FORMAT
from loraplex.platform.web.adapters import adapter_queries as detail
from loraplex.platform.web.adapters import queries as listing
from loraplex.platform.web.adapters.adapter_queries import AdapterDetail, VersionDetail, config_diff
from loraplex.platform.web.adapters.residency import Residency, residency
from loraplex.platform.web.adapters.routes import MAX_DESCRIPTION
from loraplex.platform.web.console.addresses import path_of
from loraplex.platform.web.console.form_routes import FormSubmission, VersionNumber, form_page, submits
from loraplex.platform.web.console.forms import FormInvalid
from loraplex.platform.web.console.page import AFTER, PageRequest, opens
from loraplex.tenants.administration import adapters
from loraplex.tenants.errors import AdapterNotFound, VersionNotFound
from loraplex.tenants.evaluations import queries as evaluations
from loraplex.tenants.pages import Part
from loraplex.tenants.registry import queries
from loraplex.tenants.registry.records import CalibrationDocument, VersionDocument
from loraplex.tenants.scopes import ADAPTERS_READ, ADAPTERS_WRITE

Reader = Annotated[PageRequest, opens(ADAPTERS_READ)]
Writer = Annotated[PageRequest, opens(ADAPTERS_WRITE)]
Submission = Annotated[FormSubmission, submits(ADAPTERS_WRITE)]
LIST: Final = "/console/adapters"
ONE: Final = f"{LIST}/{{name}}"
SOME_EVALUATIONS: Final[Part[UUID]] = Part(5)
"""Those of a version that its adapter's page shows; a page of their own has all."""

router = APIRouter()


class AdapterForm(BaseModel):
    name: str
    description: str = Field(default="", max_length=MAX_DESCRIPTION)


class DescriptionForm(BaseModel):
    description: str = Field(default="", max_length=MAX_DESCRIPTION)


@router.get(LIST)
async def list_adapters(page: Reader, search: str = "", state: str = "") -> Response:
    part, found_in = page.part(listing.BY_NAME, parameter=AFTER), await residency_of(page)
    async with page.reading() as session:
        found = await listing.listed_adapters(
            session, page.tenant_id, found_in, part, search=search, state=state
        )
        space = await listing.space(session, page.tenant_id)
    return page.show(
        "adapters/list.html",
        adapters=page.rows(part, found, parameter=AFTER),
        space=space,
        search=search,
        state=state,
        states=listing.STATES,
        is_filtered=bool(search or state or part.after),
        is_residency_known=found_in.is_known,
    )


async def new_form(page: Writer) -> dict[str, object]:
    """Return what the form of a new adapter shows."""
    return {}


@form_page(
    router,
    f"{LIST}/new",
    "adapters/new.html",
    new_form,
    fields=("name", "description"),
    renamed={"adapter name": "name"},
)
async def create_adapter(submission: Submission) -> Response:
    values = submission.parse(AdapterForm)
    await submission.run(
        adapters.create,
        submission.tenant_id,
        values.name,
        values.description,
        base_model=submission.dependencies.served_model_name,
    )
    return submission.back(path_of("adapters", values.name, "upload"), f"Adapter {values.name} was created.")


@router.get(ONE)
async def show_adapter(
    page: Reader,
    name: str,
    version: VersionNumber | None = None,
    compare: VersionNumber | None = None,
    before: VersionNumber | None = None,
) -> Response:
    found_in = await residency_of(page)
    try:
        async with page.reading() as session:
            shown = await detail.adapter(session, page.tenant_id, name, found_in, before)
            chosen, compared = await _chosen(session, page.tenant_id, shown, version, compare)
            number = None if chosen is None else chosen.record.version
            calibration = await _calibration(page, session, chosen)
            evaluated = await evaluations.evaluations(session, page.tenant_id, name, number, SOME_EVALUATIONS)
    except (AdapterNotFound, VersionNotFound) as error:
        near = get_close_matches(name, await page.query(queries.names, page.tenant_id), 1)
        return page.show("adapters/missing.html", status=404, message=str(error), near=next(iter(near), None))
    return page.show(
        "adapters/adapter.html",
        adapter=shown.record,
        detail=shown,
        before=before,
        chosen=chosen,
        refused_by=refused_by(found_in, chosen),
        compared=compared,
        evaluations=evaluated,
        calibration=calibration,
        diff=[] if chosen is None or compared is None else config_diff(compared.config, chosen.record.config),
        can_write=ADAPTERS_WRITE in page.session.scopes,
    )


async def _chosen(
    session: AsyncSession, tenant_id: UUID, shown: AdapterDetail, version: int | None, compare: int | None
) -> tuple[VersionDetail | None, VersionDocument | None]:
    """Return the version whose report is shown, the newest one by default, and an older one to compare with."""
    name, newest = shown.record.name, next(iter(shown.versions), None)
    number = version or (None if newest is None else newest.record.version)
    if number is None:
        return None, None
    chosen = await detail.version(session, tenant_id, name, number)
    older = compare or await detail.version_before(session, tenant_id, name, number)
    if older is None or chosen.record.config is None:
        return chosen, None
    return chosen, await queries.version(session, tenant_id, name, older)


async def _calibration(
    page: PageRequest, session: AsyncSession, chosen: VersionDetail | None
) -> CalibrationDocument | None:
    """Return the calibration of a version's decisions under the base model that is served."""
    served = page.dependencies.engine.info().system_fingerprint
    if chosen is None or served is None:
        return None
    return await queries.calibration_of(session, page.tenant_id, chosen.record, served, FORMAT)


@router.get(f"{ONE}/versions/{{version}}/report")
async def show_report(page: Reader, name: str, version: VersionNumber) -> Response:
    """The report alone: it asks for itself again until the validation has ended."""
    chosen = await page.query(detail.version, page.tenant_id, name, version)
    refusing = refused_by(await residency_of(page), chosen)
    return page.show("adapters/report.html", name=name, chosen=chosen, refused_by=refusing)


async def description_form(page: Writer, name: str) -> dict[str, object]:
    """Return what the form of a description shows. Raises `AdapterNotFound`."""
    return {"adapter": await page.query(queries.adapter, page.tenant_id, name)}


async def deletion_form(page: Writer, name: str) -> dict[str, object]:
    """Return what the question about an adapter shows. Raises `AdapterNotFound`."""
    shown = await page.query(detail.adapter, page.tenant_id, name)
    return {"adapter": shown.record, "detail": shown}


@form_page(router, f"{ONE}/edit", "adapters/edit.html", description_form, fields=("description",))
async def describe_adapter(submission: Submission, name: str) -> Response:
    values = submission.parse(DescriptionForm)
    await submission.run(
        adapters.describe, submission.tenant_id, name, values.description, seen=submission.revision
    )
    return submission.back(path_of("adapters", name), "The description was changed.")


@form_page(router, f"{ONE}/delete", "adapters/delete.html", deletion_form, fields=("typed",))
async def delete_adapter(submission: Submission, name: str) -> Response:
    if submission.form.text("typed") != name:
        raise FormInvalid({"typed": f"Type {name}."})
    await submission.run(adapters.delete, submission.tenant_id, name)
    return submission.back(LIST, f"Adapter {name} is deleted. Its usage and invoices stay.")


async def residency_of(page: PageRequest) -> Residency:
    """Return which of the tenant's adapters are in the memory of an engine."""
    dependencies = page.dependencies
    return await residency(dependencies.engine, dependencies.namespace_of(page.tenant_id))


def refused_by(found_in: Residency, version: VersionDetail | None) -> tuple[int, ...]:
    """Return the numbers of the engines that refuse the weights of a version now."""
    digest = None if version is None else version.record.digest
    return () if digest is None else found_in.refused_by.get(digest, ())
