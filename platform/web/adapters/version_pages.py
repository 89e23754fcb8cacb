"""Versions of an adapter: upload, deprecate, restore, delete. Below `/console/adapters/{name}`.

Invariant: a form carries the revision that its author has read; a version that changed meanwhile is left as it is.
"""

from typing import Final

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.web.adapters import adapter_queries as detail
from loraplex.platform.web.adapters.pages import ONE, Submission, Writer
from loraplex.platform.web.adapters.queries import space
from loraplex.platform.web.console.addresses import path_of
from loraplex.platform.web.console.form_routes import VersionNumber, form_page
from loraplex.tenants.administration import versions
from loraplex.tenants.registry import queries

VERSION: Final = f"{ONE}/versions/{{version}}"

router = APIRouter()


@router.get(f"{ONE}/upload")
async def upload(page: Writer, name: str) -> Response:
    """The page whose script sends the files to the API, with a bearer of ten minutes."""
    async with page.reading() as session:
        uploads = await queries.open_uploads(session, page.tenant_id, name)
        used = await space(session, page.tenant_id)
    return page.show(
        "adapters/upload.html", name=name, uploads=uploads, space=used, max_bytes=detail.MAX_FILE_BYTES
    )


# Both without a question: the reverse stands in the same place.
@router.post(f"{VERSION}/deprecate")
async def deprecate_version(submission: Submission, name: str, version: VersionNumber) -> Response:
    await submission.run(versions.deprecate, submission.tenant_id, name, version, seen=submission.revision)
    toast = f"{name}@{version} is deprecated: requests for it are refused."
    return submission.back(path_of("adapters", name), toast)


@router.post(f"{VERSION}/restore")
async def restore_version(submission: Submission, name: str, version: VersionNumber) -> Response:
    await submission.run(versions.restore, submission.tenant_id, name, version, seen=submission.revision)
    return submission.back(path_of("adapters", name), f"{name}@{version} is ready again.")


async def version_form(page: Writer, name: str, version: VersionNumber) -> dict[str, object]:
    """Return what the question about a version shows. Raises `AdapterNotFound`, `VersionNotFound`."""
    async with page.reading() as session:
        shown = await detail.adapter(session, page.tenant_id, name)
        chosen = await queries.version(session, page.tenant_id, name, version)
    row = next((each for each in shown.versions if each.record.version == version), None)
    return {"adapter": shown.record, "chosen": chosen, "row": row}


@form_page(router, f"{VERSION}/delete", "adapters/delete_version.html", version_form)
async def delete_version(submission: Submission, name: str, version: VersionNumber) -> Response:
    await submission.run(versions.delete, submission.tenant_id, name, version, seen=submission.revision)
    return submission.back(path_of("adapters", name), f"Version {version} is deleted; its files follow.")
