"""Conditional changes (RFC 9110, section 13): a change names the revision its author has seen, so that no change is lost.

A revision is a whole number, and its ETag is that number in quotes. One strong ETag is accepted, no list and no `*`.
"""

import re
from typing import Final

from starlette.requests import Request

from loraplex.platform.errors import InvalidParameter, PreconditionRequired

ABSENT: Final = 0
_ETAG: Final = re.compile(r'"([1-9][0-9]{0,17})"')


def if_match(request: Request) -> int:
    """Return the revision of If-Match. Raises `PreconditionRequired` without one, `InvalidParameter` for another form."""
    given = request.headers.getlist("if-match")
    if not given:
        raise PreconditionRequired("If-Match is required: the ETag of what this changes.")
    match = _ETAG.fullmatch(given[0].strip()) if len(given) == 1 else None
    if match is None:
        raise InvalidParameter('If-Match must be one ETag of this server, such as `"3"`.', param="If-Match")
    return int(match[1])


def if_match_or_any(request: Request) -> int | None:
    """Return the revision of If-Match; None without the header: any revision. Raises `InvalidParameter` for another form."""
    return if_match(request) if "if-match" in request.headers else None


def if_match_or_new(request: Request) -> int:
    """Return the revision of If-Match, or `ABSENT` for `If-None-Match: *`: the resource must not exist yet.

    Raises `PreconditionRequired` without either, `InvalidParameter` for both or another form.
    """
    given = request.headers.getlist("if-none-match")
    if not given:
        if "if-match" not in request.headers:
            raise PreconditionRequired(
                "If-Match (the ETag of what this changes) or `If-None-Match: *` (the resource is new) is required."
            )
        return if_match(request)
    if given != ["*"] or "if-match" in request.headers:
        raise InvalidParameter("If-None-Match must be `*`, and without If-Match.", param="If-None-Match")
    return ABSENT
