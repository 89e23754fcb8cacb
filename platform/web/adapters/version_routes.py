"""Routes of an adapter's versions: their state, their validation report check by check, and their profile."""

import re
from typing import Annotated, Final

from fastapi import APIRouter
from pydantic import PlainValidator, WithJsonSchema
from starlette.responses import Response

from loraplex.platform.parameters.adapter_profile import profile_schema, read_profile_change
from loraplex.platform.web.adapters.routes import Reader, Writer
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.request_bodies import body_read_by
from loraplex.platform.web.responses import documented
from loraplex.platform.web.sorting import SortOrder, by_number
from loraplex.tenants.administration import versions
from loraplex.tenants.errors import VersionNotFound
from loraplex.tenants.registry import queries
from loraplex.tenants.registry.records import ProfileChange, VersionDocument

BY_NUMBER: Final[SortOrder[VersionDocument, int]] = by_number(lambda version: version.version)
VERSION: Final = "/adapters/{name}/versions/{version}"
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,9}")

router = APIRouter()


def number_of(text: str) -> int:
    """Parse a version number. Raises `VersionNotFound` for any other text."""
    if not _NUMBER.fullmatch(text):
        raise VersionNotFound(f"no version {text[:20]!r}: versions are numbers from 1")
    return int(text)


Version = Annotated[int, PlainValidator(number_of), WithJsonSchema({"type": "string"})]
CHANGED: Final = documented(409, 412, 422, response=VersionDocument)
CHANGE: Final = described(if_match=True, if_match_required=False, repeatable=True)


@router.get("/adapters/{name}/versions", **listed(VersionDocument))
async def list_versions(request: Reader, name: str) -> Response:
    """List the versions, newest first."""
    page = request.page(BY_NUMBER)
    return await request.listing(page, queries.versions, request.tenant_id, name, page)


@router.get(VERSION, responses=documented(response=VersionDocument))
async def get_version(request: Reader, name: str, version: Version) -> Response:
    return await request.read(queries.version, request.tenant_id, name, version)


@router.patch(
    VERSION,
    responses=documented(409, 412, 428, response=VersionDocument),
    openapi_extra=described(if_match=True) | profile_schema(),
)
async def change_version(
    request: Writer,
    name: str,
    version: Version,
    change: Annotated[ProfileChange, body_read_by(read_profile_change)],
) -> Response:
    """Change the profile; it is fixed once an alias has pointed to the version."""
    return await request.run(
        versions.change_profile, request.tenant_id, name, version, change, seen=request.if_match
    )


@router.delete(
    VERSION,
    status_code=204,
    responses=documented(409, 412),
    openapi_extra=described(if_match=True, if_match_required=False),
)
async def delete_version(request: Writer, name: str, version: Version) -> Response:
    """Delete a version. Refused while an alias points to it, it is being validated, or requests use it."""
    return await request.run(versions.delete, request.tenant_id, name, version, seen=request.if_match_or_any)


@router.post(f"{VERSION}/deprecate", responses=CHANGED, openapi_extra=CHANGE)
async def deprecate_version(request: Writer, name: str, version: Version) -> Response:
    """Take a ready version out of service. Refused while an alias points to it."""
    return await request.run(
        versions.deprecate, request.tenant_id, name, version, seen=request.if_match_or_any
    )


@router.post(f"{VERSION}/restore", responses=CHANGED, openapi_extra=CHANGE)
async def restore_version(request: Writer, name: str, version: Version) -> Response:
    """Make a deprecated version ready again."""
    return await request.run(versions.restore, request.tenant_id, name, version, seen=request.if_match_or_any)
