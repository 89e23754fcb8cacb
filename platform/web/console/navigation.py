"""What the console's navigation offers to a person: entries by scope, in groups."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

ADMIN: Final = "tenant:admin"
FIRST_PAGES: Final = ("/console", "/operator/console")


@dataclass(frozen=True, slots=True)
class Entry:
    """A link to a page. `scope`: what it needs; None: any session. `is_current`: this page, or one below it, is shown.

    `count`: how many things the page lists, None where that is not said.
    """

    label: str
    path: str
    icon: str
    scope: str | None = None
    is_current: bool = False
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Entries under one heading; the first group has none."""

    label: str | None
    entries: tuple[Entry, ...]


TENANT_AREA: Final = (
    Group(
        None,
        (
            Entry("Overview", "/console", "overview"),
            Entry("Playground", "/console/playground", "playground", "inference"),
        ),
    ),
    Group(
        "Build",
        (
            Entry("Adapters", "/console/adapters", "adapters", "adapters:read"),
            Entry("Keys", "/console/keys", "keys", "keys:write"),
        ),
    ),
    Group(
        "Observe",
        (
            Entry("Requests", "/console/requests", "requests", "usage:read"),
            Entry("Usage", "/console/usage", "usage", "usage:read"),
            Entry("Limits", "/console/limits", "limits"),
        ),
    ),
    Group(
        "Account",
        (
            Entry("Billing", "/console/billing", "billing", "billing:read"),
            Entry("Webhooks", "/console/webhooks", "webhooks", "billing:read"),
            Entry("Team", "/console/team", "team", ADMIN),
            Entry("Audit log", "/console/audit", "audit", ADMIN),
        ),
    ),
)
OPERATOR_AREA: Final = (
    Group(
        None,
        (
            Entry("Tenants", "/operator/console", "tenants"),
            Entry("Sign-up", "/operator/console/plan", "sign-up"),
        ),
    ),
    Group(
        "Money",
        (
            Entry("Rate cards", "/operator/console/rate-cards", "rate-cards"),
            Entry("Credits", "/operator/console/credits", "credits"),
            Entry("Invoices", "/operator/console/invoices", "billing"),
            Entry("Usage", "/operator/console/usage", "usage"),
        ),
    ),
    Group(
        "Service",
        (
            Entry("Live", "/operator/console/live", "live"),
            Entry("Engine", "/operator/console/engine", "engine"),
            Entry("Drift", "/operator/console/drift", "drift"),
            Entry("Health", "/operator/console/health", "health"),
            Entry("Audit log", "/operator/console/audit", "audit"),
        ),
    ),
)


def navigation(
    area: tuple[Group, ...], scopes: AbstractSet[str], path: str, counts: Mapping[str, int]
) -> tuple[Group, ...]:
    """Return the entries of an area that the scopes open, with that of `path` marked. `counts`: by the paths of entries."""
    opened = [
        (group, [each for each in group.entries if each.scope is None or each.scope in scopes])
        for group in area
    ]
    leading = [each.path for _, entries in opened for each in entries if _leads(each, path)]
    current = max(leading, key=len, default=None)
    return tuple(
        Group(
            group.label,
            tuple(
                replace(each, is_current=each.path == current, count=counts.get(each.path))
                for each in entries
            ),
        )
        for group, entries in opened
        if entries
    )


def _leads(entry: Entry, path: str) -> bool:
    """Every page of an area is below its first one, so that is the current one only where it is shown itself."""
    return path == entry.path or (entry.path not in FIRST_PAGES and path.startswith(f"{entry.path}/"))
