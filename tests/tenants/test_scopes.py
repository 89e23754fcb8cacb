"""Scopes: what implies what, and what is refused."""

import pytest

from loraplex.tenants.errors import InvalidScope
from loraplex.tenants.scopes import TENANT_SCOPES, check_scopes, effective_scopes


def test_admin_implies_every_tenant_scope_but_not_operator() -> None:
    assert effective_scopes(["tenant:admin"]) == TENANT_SCOPES
    assert "operator" not in effective_scopes(["tenant:admin"])
    assert effective_scopes(["inference"]) == {"inference"}


@pytest.mark.parametrize(
    ("scopes", "operator"),
    [(["operator"], False), (["inference"], True), (["inference", "root"], False), ([], False), ([], True)],
)
def test_foreign_scopes_are_refused(scopes: list[str], operator: bool) -> None:
    with pytest.raises(InvalidScope, match="scope") as caught:
        check_scopes(scopes, operator=operator)
    assert caught.value.field == "scopes"


def test_scopes_are_sorted_and_unique() -> None:
    assert check_scopes(["usage:read", "inference", "inference"], operator=False) == [
        "inference",
        "usage:read",
    ]
