"""Roles of people. Invariant: a role is a set of scopes of API keys and nothing else, so that one check guards page and API."""

from typing import Final

from loraplex.tenants.errors import InvalidField
from loraplex.tenants.scopes import (
    ADAPTERS_READ,
    ADAPTERS_WRITE,
    BILLING_READ,
    INFERENCE,
    KEYS_WRITE,
    OPERATOR_SCOPES,
    ROLES,
    TENANT_ADMIN,
    USAGE_READ,
    effective_scopes,
)

ADMIN: Final = "admin"
ROLE_SCOPES: Final = {
    ADMIN: frozenset({TENANT_ADMIN}),
    "developer": frozenset({INFERENCE, ADAPTERS_READ, ADAPTERS_WRITE, KEYS_WRITE, USAGE_READ}),
    "billing": frozenset({USAGE_READ, BILLING_READ}),
    "viewer": frozenset({ADAPTERS_READ, USAGE_READ}),
}
VIEWING_SCOPES: Final = frozenset({ADAPTERS_READ, USAGE_READ, BILLING_READ})
"""The scopes of an operator who looks into a tenant: they change nothing."""


def scopes_of(role: str | None) -> frozenset[str]:
    """Return the effective scopes of a member's role; None: those of the operator's area."""
    return OPERATOR_SCOPES if role is None else effective_scopes(ROLE_SCOPES[role])


def check_role(role: str) -> str:
    """Raises `InvalidField`."""
    if role not in ROLES:
        raise InvalidField("role", f"role {role[:40]!r} does not exist; allowed: {', '.join(ROLES)}")
    return role
