"""Addresses of an adapter's pages, and the tabs that lead from one to another."""

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlencode

from loraplex.platform.console.endpoint import ConsoleEndpoint
from loraplex.platform.services.people.identity import ConsoleSession

_TABS: Final = (
    ("Usage", "/console/usage", "adapter", "usage:read"),
    ("Limits", "/console/limits", "adapter", "adapters:read"),
    ("Requests", "/console/requests", "adapter", "usage:read"),
    ("Audit", "/console/audit", "target", "tenant:admin"),
)


@dataclass(frozen=True, slots=True)
class Tab:
    """A page that shows the same adapter."""

    label: str
    href: str


def adapter_address(name: str, *below: str) -> str:
    """Return the path of an adapter's page, or of a page below it."""
    return "/".join(["/console/adapters", *(quote(part, safe="") for part in (name, *below))])


def with_query(path: str, **query: str) -> str:
    """Return a path with those parameters that are not empty."""
    given = {name: value for name, value in query.items() if value}
    return f"{path}?{urlencode(given)}" if given else path


def tabs_of(endpoint: ConsoleEndpoint, session: ConsoleSession, name: str) -> list[Tab]:
    """Return the tabs of an adapter that the person may open, without that of its versions."""
    value = {"adapter": name, "target": f"adapters/{name}"}
    return [
        Tab(label, with_query(path, **{parameter: value[parameter]}))
        for label, path, parameter, scope in _TABS
        if path in endpoint.pages and scope in session.scopes
    ]
