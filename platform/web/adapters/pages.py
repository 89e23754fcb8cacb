"""Adapters: `/console/adapters`, and the page of one adapter with its versions, reports and residency."""

from difflib import get_close_matches
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.errors import describe
from loraplex.platform.services import adapters
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.web.adapters import adapter_queries as detail
from loraplex.platform.web.adapters import queries as listing
from loraplex.platform.web.adapters.adapter_queries import AdapterDetail, VersionDetail
from loraplex.platform.web.adapters.residency import Residency, residency
from loraplex.platform.web.console.addresses import link, path_of
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.form_routes import VersionNumber, revision_of
from loraplex.platform.web.console.forms import Form, FormInvalid, parse
from loraplex.platform.web.console.legacy_forms import Sent, add_form, tenant_of
from loraplex.tenants.unit_of_work import UnitOfWork

LIST: Final = "/console/adapters"
ONE: Final = f"{LIST}/{{name}}"
MAX_DESCRIPTION: Final = 1000


class AdapterForm(BaseModel):
    name: str
    description: str = Field(default="", max_length=MAX_DESCRIPTION)


class DescriptionForm(BaseModel):
    description: str = Field(default="", max_length=MAX_DESCRIPTION)


def adapters_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of the list and of one adapter."""
    router = APIRouter()
    reader, writer = Depends(endpoint.requires("adapters:read")), Depends(endpoint.requires("adapters:write"))
    _add_list(router, endpoint, reader)
    _add_creation(router, endpoint, writer)
    _add_adapter(router, endpoint, reader)
    _add_description(router, endpoint, writer)
    _add_deletion(router, endpoint, writer)
    return router


def _add_list(router: APIRouter, endpoint: ConsoleEndpoint, reader: Any) -> None:
    @router.get(LIST)
    async def list_adapters(
        request: Request,
        session: Annotated[ConsoleSession, reader],
        search: str = "",
        state: str = "",
        after: str = "",
    ) -> Response:
        found_in = await residency_of(endpoint, session)

        async def find(found: AsyncSession) -> tuple[listing.AdapterPage, listing.Space]:
            page = await listing.adapter_page(
                found, tenant_of(session), found_in, search=search, state=state, after=after
            )
            return page, await listing.space(found, tenant_of(session))

        page, space = await endpoint.query(session, find)
        query = {"search": search, "state": state}
        return endpoint.page(
            *(request, session, "adapters/list.html"),
            adapters=page.adapters,
            space=space,
            search=search,
            state=state,
            states=listing.STATES,
            is_filtered=bool(search or state or after),
            older=None if page.after is None else link(LIST, {**query, "after": page.after}),
            newest=link(LIST, query) if after else None,
            is_residency_known=found_in.is_known,
        )


def _add_creation(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    async def create_adapter(sent: Sent) -> Response:
        asked = parse(sent.form, AdapterForm)

        async def work(uow: UnitOfWork) -> None:
            base_model = endpoint.dependencies.served_model_name
            await adapters.create(
                *(uow, sent.tenant_id, asked.name, asked.description), base_model=base_model
            )

        await sent.perform(work)
        upload = path_of("adapters", asked.name, "upload")
        return sent.back(upload, f"Adapter {asked.name} was created.")

    async def nothing_yet(*_: object) -> dict[str, object]:
        return {}

    add_form(
        *(router, f"{LIST}/new", endpoint),
        access=writer,
        template="adapters/new.html",
        find=nothing_yet,
        send=create_adapter,
        fields=("name", "description"),
        renamed={"adapter name": "name"},
    )


def _add_adapter(router: APIRouter, endpoint: ConsoleEndpoint, reader: Any) -> None:
    @router.get(ONE)
    async def show_adapter(
        name: str,
        request: Request,
        session: Annotated[ConsoleSession, reader],
        version: VersionNumber | None = None,
        compare: VersionNumber | None = None,
        before: VersionNumber | None = None,
    ) -> Response:
        found_in = await residency_of(endpoint, session)

        async def find(found: AsyncSession) -> dict[str, Any]:
            shown = await detail.adapter(found, tenant_of(session), name, found_in, before)
            chosen = await _chosen(found, session, shown, version, compare)
            return {"adapter": shown, "refused_by": refused_by(found_in, chosen["chosen"])} | chosen

        try:
            context = await endpoint.query(session, find)
        except Exception as error:
            if describe(error).row.status != 404:
                raise
            return await _missing(endpoint, request, session, name, describe(error).message)
        return endpoint.page(
            *(request, session, "adapters/adapter.html"),
            **context,
            before=before,
            can_write="adapters:write" in session.scopes,
        )

    @router.get(f"{ONE}/versions/{{version}}/report")
    async def show_report(
        name: str, version: VersionNumber, request: Request, session: Annotated[ConsoleSession, reader]
    ) -> Response:
        """The report alone: it asks for itself again until the validation has ended."""
        shown = await endpoint.query(
            session, lambda found: detail.version(found, tenant_of(session), name, version)
        )
        return endpoint.page(
            *(request, session, "adapters/report.html"),
            name=name,
            chosen=shown,
            refused_by=refused_by(await residency_of(endpoint, session), shown),
        )


async def _missing(
    endpoint: ConsoleEndpoint, request: Request, session: ConsoleSession, name: str, message: str
) -> Response:
    """Say that there is no such adapter or version, and which name may have been meant."""
    names = await endpoint.query(session, lambda found: detail.names(found, tenant_of(session)))
    near = get_close_matches(name, names, 1)
    return endpoint.page(
        *(request, session, "adapters/missing.html"), status=404, message=message, near=next(iter(near), None)
    )


async def _chosen(
    found: AsyncSession,
    session: ConsoleSession,
    shown: AdapterDetail,
    version: int | None,
    compare: int | None,
) -> dict[str, Any]:
    """Return the version whose report is shown, the newest one by default, and its configuration beside an older one."""
    number = version or (shown.versions[0].version if shown.versions else None)
    if number is None:
        return {"chosen": None, "compared": None, "diff": []}
    tenant_id = tenant_of(session)
    chosen = await detail.version(found, tenant_id, shown.name, number)
    older = compare or await detail.version_before(found, tenant_id, shown.name, number)
    compared: VersionDetail | None = None
    if older is not None and chosen.config is not None:
        compared = await detail.version(found, tenant_id, shown.name, older)
    diff = [] if compared is None else detail.config_diff(compared.config, chosen.config)
    return {"chosen": chosen, "compared": compared, "diff": diff}


def _add_description(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    async def describe_adapter(sent: Sent) -> Response:
        name, asked = sent.named("name"), parse(sent.form, DescriptionForm)

        async def work(uow: UnitOfWork) -> None:
            seen = revision_of(sent.form)
            await adapters.describe(uow, sent.tenant_id, name, asked.description, seen=seen)

        await sent.perform(work)
        return sent.back(path_of("adapters", name), "The description was changed.")

    add_form(
        *(router, f"{ONE}/edit", endpoint),
        access=writer,
        template="adapters/edit.html",
        find=asked_about,
        send=describe_adapter,
        fields=("description",),
    )


def _add_deletion(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    async def delete_adapter(sent: Sent) -> Response:
        name = sent.named("name")
        require_typed(sent.form, name)

        async def work(uow: UnitOfWork) -> None:
            await adapters.delete(uow, sent.tenant_id, name)

        await sent.perform(work)
        toast = f"Adapter {name} is deleted. Its usage and invoices stay."
        return sent.back(LIST, toast)

    add_form(
        *(router, f"{ONE}/delete", endpoint),
        access=writer,
        template="adapters/delete.html",
        find=asked_about,
        send=delete_adapter,
        fields=("typed",),
    )


async def residency_of(endpoint: ConsoleEndpoint, session: ConsoleSession) -> Residency:
    """Return which of the tenant's adapters are in the memory of an engine."""
    dependencies = endpoint.dependencies
    return await residency(dependencies.engine, dependencies.namespace_of(tenant_of(session)))


def refused_by(found_in: Residency, version: VersionDetail | None) -> tuple[int, ...]:
    """Return the numbers of the engines that refuse the weights of a version now."""
    digest = None if version is None else version.digest
    return () if digest is None else found_in.refused_by.get(digest, ())


async def find_adapter(endpoint: ConsoleEndpoint, session: ConsoleSession, name: str) -> AdapterDetail:
    """Return an adapter of the session's tenant. Raises `AdapterNotFound`."""
    return await endpoint.query(session, lambda found: detail.adapter(found, tenant_of(session), name))


async def asked_about(
    endpoint: ConsoleEndpoint, request: Request, session: ConsoleSession
) -> dict[str, object]:
    """Return what forms about an adapter show. Raises `AdapterNotFound`."""
    return {"adapter": await find_adapter(endpoint, session, request.path_params["name"])}


def require_typed(form: Form, name: str) -> None:
    """Raise `FormInvalid` unless the name of what is to be deleted was typed."""
    if form.text("typed") != name:
        raise FormInvalid({"typed": f"Type {name}."})
