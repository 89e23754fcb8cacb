"""Scopes: the rights of a key. Invariant: an unknown scope is refused by name; only operator keys have `operator`."""

from collections.abc import Iterable

from loraplex.tenants.errors import InvalidScope

TENANT_ADMIN = "tenant:admin"
OPERATOR = "operator"
INFERENCE = "inference"
KEYS_WRITE = "keys:write"
ADAPTERS_READ = "adapters:read"
ADAPTERS_WRITE = "adapters:write"
USAGE_READ = "usage:read"
BILLING_READ = "billing:read"
TENANT_SCOPES = frozenset(
    {
        *(INFERENCE, ADAPTERS_READ, ADAPTERS_WRITE, KEYS_WRITE),
        *(USAGE_READ, BILLING_READ, TENANT_ADMIN),
    }
)
OPERATOR_SCOPES = frozenset({OPERATOR})
ROLES = ("admin", "developer", "billing", "viewer")
"""The roles of people: each is a set of scopes."""


def effective_scopes(scopes: Iterable[str]) -> frozenset[str]:
    """The scopes with what they imply: `tenant:admin` implies every tenant scope."""
    granted = frozenset(scopes)
    return granted | TENANT_SCOPES if TENANT_ADMIN in granted else granted


def check_scopes(scopes: Iterable[str], *, operator: bool) -> list[str]:
    """The scopes, sorted and without duplicates. Raises `InvalidScope` for an empty or a foreign set."""
    allowed = OPERATOR_SCOPES if operator else TENANT_SCOPES
    chosen = sorted(set(scopes))
    if not chosen:
        raise InvalidScope(f"a key needs at least one scope of: {', '.join(sorted(allowed))}")
    if refused := [scope for scope in chosen if scope not in allowed]:
        kind = "an operator key" if operator else "a tenant key"
        raise InvalidScope(
            f"{refused[0][:40]!r} is no scope of {kind}; allowed: {', '.join(sorted(allowed))}"
        )
    return chosen
