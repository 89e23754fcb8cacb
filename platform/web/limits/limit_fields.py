"""The fields of a form that sets limits of a key or an adapter. Invariant: budgets are typed as money and kept in micro-units."""

from collections.abc import Mapping
from typing import Annotated, TypeAlias

from pydantic import BaseModel

from loraplex.platform.web.console.amounts import Micro, between, decimal
from loraplex.platform.web.console.formatting import count, money_total
from loraplex.platform.web.console.forms import FormInvalid
from loraplex.platform.web.console.limit_units import unit_of
from loraplex.platform.web.limits.documents import limit_annotations
from loraplex.tenants.invoices.currencies import minor_digits
from loraplex.tenants.quotas.limits import COUNTED, MAX_BUDGET, QuotaLimits

Bounds: TypeAlias = Mapping[str, int | None]
"""The limits of the tenant by their names; None is no limit."""
Budget = Annotated[Micro, between(0, MAX_BUDGET)]
"""Micro-units, typed as money: so are its bounds in messages."""


class LimitFields(BaseModel):
    """Limits as they are typed. An empty field is no limit."""

    __annotations__ = limit_annotations(COUNTED, money=Budget)

    @property
    def limits(self) -> QuotaLimits:
        """All limits, those without a value too."""
        return QuotaLimits(**self.amounts)

    @property
    def amounts(self) -> Bounds:
        """Each limit by its name, budgets in micro-units."""
        return {name: getattr(self, name) for name in COUNTED}

    def require_within(self, bounds: Bounds, currency: str) -> None:
        """Raise `FormInvalid` with an error at each limit that is above the tenant's."""
        errors = {}
        for name, value in self.amounts.items():
            most = bounds.get(name)
            if value is not None and most is not None and value > most:
                written = _written(name, most, currency)
                errors[name] = (
                    f"{_written(name, value, currency)} is too much: at most {written}, the tenant's."
                )
        if errors:
            raise FormInvalid(errors)


def typed(name: str, value: int | None, currency: str) -> str:
    """Write a limit as it is typed, a budget with the digits of the currency's minor unit or as many as it needs."""
    if unit_of(name) == "money":
        return decimal(value, min_digits=minor_digits(currency))
    return "" if value is None else str(value)


def _written(name: str, value: int, currency: str) -> str:
    return money_total(value, currency) if unit_of(name) == "money" else count(value)
