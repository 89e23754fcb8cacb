"""The upload page: `/console/adapters/{name}/upload`. Its script sends the files to the API, with a bearer of ten minutes."""

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.web.adapters.adapter_queries import MAX_FILE_BYTES
from loraplex.platform.web.adapters.pages import ONE, Writer
from loraplex.platform.web.adapters.queries import space
from loraplex.tenants.registry import queries

router = APIRouter()


@router.get(f"{ONE}/upload")
async def upload(page: Writer, name: str) -> Response:
    async with page.reading() as session:
        uploads = await queries.open_uploads(session, page.tenant_id, name)
        used = await space(session, page.tenant_id)
    return page.show("adapters/upload.html", name=name, uploads=uploads, space=used, max_bytes=MAX_FILE_BYTES)
