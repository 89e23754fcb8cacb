"""The tabs of an adapter's page: other pages, filtered by the adapter."""

from collections.abc import Mapping
from dataclasses import dataclass

from loraplex.platform.console.addresses import link, path_of
from loraplex.platform.services.people.identity import ConsoleSession


@dataclass(frozen=True, slots=True)
class Tab:
    """A page that shows the same adapter."""

    label: str
    href: str


def tabs_of(session: ConsoleSession, name: str) -> list[Tab]:
    """Return the tabs that the person may open, without that of the versions."""
    pages: Mapping[str, tuple[str, str]] = {
        "Usage": ("usage:read", link("/console/usage", {"adapter": name})),
        "Limits": ("adapters:write", path_of("limits", "adapters", name)),
        "Requests": ("usage:read", link("/console/requests", {"adapter": name})),
        "Audit": ("tenant:admin", link("/console/audit", {"target": f"adapters/{name}"})),
    }
    return [Tab(label, href) for label, (scope, href) in pages.items() if scope in session.scopes]
