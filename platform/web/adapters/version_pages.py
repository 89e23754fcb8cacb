"""Versions of an adapter: deprecate, restore, delete. Below `/console/adapters/{name}/versions`.

Invariant: a form carries the revision that its author has read; a version that changed meanwhile is left as it is.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.services import versions
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.web.adapters import adapter_queries as detail
from loraplex.platform.web.adapters.pages import ONE, find_adapter
from loraplex.platform.web.console.addresses import path_of
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.form_routes import VersionNumber, revision_of, whole_number
from loraplex.platform.web.console.forms import Form, read_form
from loraplex.platform.web.console.legacy_forms import Sent, add_form, tenant_of
from loraplex.tenants.unit_of_work import UnitOfWork

VERSION: Final = f"{ONE}/versions/{{version}}"
AT_ONCE: Final[tuple[tuple[str, Callable[..., Awaitable[object]], str], ...]] = (
    ("deprecate", versions.deprecate, "is deprecated: requests for it are refused."),
    ("restore", versions.restore, "is ready again."),
)
"""What is done without a question, for the reverse stands in the same place: its path, use case and toast."""


def versions_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes that change versions."""
    router = APIRouter()
    writer = Depends(endpoint.requires("adapters:write"))
    for act, change, toast in AT_ONCE:
        _add_act(router, endpoint, writer, act, change, toast)
    _add_deletion(router, endpoint, writer)
    return router


def _add_act(
    router: APIRouter,
    endpoint: ConsoleEndpoint,
    writer: Any,
    act: str,
    change: Callable[..., Awaitable[object]],
    toast: str,
) -> None:
    @router.post(f"{VERSION}/{act}")
    async def change_version(
        name: str,
        version: VersionNumber,
        request: Request,
        session: Annotated[ConsoleSession, writer],
        form: Annotated[Form, Depends(read_form)],
    ) -> Response:
        async def work(uow: UnitOfWork) -> None:
            await change(uow, tenant_of(session), name, version, seen=revision_of(form))

        await endpoint.perform(request, session, form, work)
        return endpoint.back(request, session, path_of("adapters", name), f"{name}@{version} {toast}")


def _add_deletion(router: APIRouter, endpoint: ConsoleEndpoint, writer: Any) -> None:
    async def delete_version(sent: Sent) -> Response:
        name, version = sent.named("name"), version_of(sent.request)

        async def work(uow: UnitOfWork) -> None:
            seen = revision_of(sent.form)
            await versions.delete(uow, sent.tenant_id, name, version, seen=seen)

        await sent.perform(work)
        toast = f"Version {version} is deleted; its files follow."
        return sent.back(path_of("adapters", name), toast)

    add_form(
        *(router, f"{VERSION}/delete", endpoint),
        access=writer,
        template="adapters/delete_version.html",
        find=asked_about,
        send=delete_version,
    )


async def asked_about(
    endpoint: ConsoleEndpoint, request: Request, session: ConsoleSession
) -> dict[str, object]:
    """Return what the question about a version shows. Raises `AdapterNotFound`, `VersionNotFound`."""
    name, version = request.path_params["name"], version_of(request)
    adapter = await find_adapter(endpoint, session, name)
    chosen = await endpoint.query(
        session, lambda found: detail.version(found, tenant_of(session), name, version)
    )
    row = next((each for each in adapter.versions if each.version == version), None)
    return {"adapter": adapter, "chosen": chosen, "row": row}


def version_of(request: Request) -> int:
    """Return the version that the path names; 0, which no version has, if that is no number."""
    return whole_number(request.path_params["version"]) or 0
