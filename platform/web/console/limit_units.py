"""What each limit counts, for pages that show its number."""

from typing import Literal, TypeAlias

from loraplex.tenants.quotas.limits import BUDGETS

Unit: TypeAlias = Literal["requests", "tokens", "money", "bytes", "things"]


def unit_of(limit_name: str) -> Unit:
    """What a limit counts."""
    if limit_name in BUDGETS:
        return "money"
    if limit_name == "max_adapter_bytes":
        return "bytes"
    if limit_name.startswith("tokens"):
        return "tokens"
    return "things" if limit_name.startswith("max_") else "requests"
