"""Tools that only the host of another API can run, such as a web search: refused, or left out aloud at the client's wish.

Invariant: such a tool is never left out unless the request's header says so, and the response's header then names it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from loraplex.platform.errors import InvalidParameter, UnsupportedTool

HEADER: Final = "x-loraplex-unsupported-tools"
IGNORE: Final = "ignore"
LEFT_OUT_HEADER: Final = "x-loraplex-ignored"
MAX_TYPE: Final = 64
HEADER_PARAMETER: Final[dict[str, Any]] = {
    "name": HEADER,
    "in": "header",
    "required": False,
    "description": f"`{IGNORE}`: tools that only a host can run are left out, and named in `{LEFT_OUT_HEADER}`, instead of refused.",
    "schema": {"enum": [IGNORE]},
}
"""The header in the OpenAPI document of an operation."""


@dataclass(frozen=True, slots=True)
class HostTool:
    """A tool of another API's host. `type`: by which a client asks for it, at most `MAX_TYPE` characters."""

    type: str


def hosted_of(tools: Sequence[object], place: str) -> tuple[tuple[str, HostTool], ...]:
    """Return those of the tools that a host runs, with their places in the body."""
    return tuple((f"{place}[{i}]", each) for i, each in enumerate(tools) if isinstance(each, HostTool))


def leave_out(
    tools: Sequence[tuple[str, HostTool]], headers: Mapping[str, str], response_headers: dict[str, str]
) -> None:
    """Name the tools in `response_headers` if `headers` ask to ignore them. `tools`: each with its place, such as `tools[4]`.

    Raises `UnsupportedTool` for the first one, and `InvalidParameter` for another value of the header.
    """
    wanted = headers.get(HEADER)
    if wanted not in (None, IGNORE):
        raise InvalidParameter(f"The header `{HEADER}` must be absent or `{IGNORE}`.", param=HEADER)
    if tools and wanted is None:
        place, tool = tools[0]
        raise UnsupportedTool(
            f"`{place}` is a tool of type {tool.type!r}, which this server does not run; leave it out, "
            f"or send the header `{HEADER}: {IGNORE}`.",
            param=place,
        )
    if tools:
        response_headers[LEFT_OUT_HEADER] = ", ".join(place for place, _ in tools)
