"""The upload page: `/console/adapters/{name}/upload`. Its script sends the files to the API, with a bearer of ten minutes."""

from typing import Annotated, Final

from fastapi import APIRouter, Depends
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.web.adapters import adapter_queries as detail
from loraplex.platform.web.adapters import queries as listing
from loraplex.platform.web.adapters.pages import ONE
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.legacy_forms import tenant_of

UPLOAD: Final = f"{ONE}/upload"


def uploads_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the route of the upload page."""
    router = APIRouter()
    writer = Depends(endpoint.requires("adapters:write"))

    @router.get(UPLOAD)
    async def upload(name: str, request: Request, session: Annotated[ConsoleSession, writer]) -> Response:
        tenant_id = tenant_of(session)

        async def find(found: AsyncSession) -> tuple[list[detail.OpenUpload], listing.Space]:
            return (
                await detail.open_uploads(found, tenant_id, name),
                await listing.space(found, tenant_id),
            )

        uploads, space = await endpoint.query(session, find)
        return endpoint.page(
            *(request, session, "adapters/upload.html"),
            name=name,
            uploads=uploads,
            space=space,
            max_bytes=detail.MAX_FILE_BYTES,
        )

    return router
