"""The fields of a form that sets limits of a key or an adapter. Invariant: budgets are typed as money and kept in micro-units."""

import re
from collections.abc import Mapping
from typing import Annotated, Final, TypeAlias

from pydantic import BaseModel, BeforeValidator, Field

from loraplex.platform.web.console.formatting import count, money_total
from loraplex.platform.web.console.forms import FormInvalid
from loraplex.platform.web.console.limit_units import unit_of
from loraplex.tenants.quotas.limits import BUDGETS, COUNTED, QuotaLimits

MICRO: Final = 1_000_000
_MONEY: Final = re.compile(r"([0-9]{1,12})(?:\.([0-9]{1,6}))?")
_QUOTED_LENGTH: Final = 40
Bounds: TypeAlias = Mapping[str, int | None]
"""The limits of the tenant by their names; None is no limit."""


def micro_units(text: object) -> int:
    """Read an amount of money such as 30.00, exactly. Raises `ValueError`."""
    amount = _MONEY.fullmatch(str(text).replace(",", ""))
    if amount is None:
        raise ValueError(f"“{str(text)[:_QUOTED_LENGTH]}” is no amount such as 30.00.")
    return int(amount[1]) * MICRO + int((amount[2] or "").ljust(6, "0"))


_Whole = Annotated[int | None, Field(default=None, ge=0)]
_Money = Annotated[int | None, Field(default=None), BeforeValidator(micro_units)]


class LimitFields(BaseModel):
    """Limits as they are typed. An empty field is no limit."""

    __annotations__ = {name: _Money if name in BUDGETS else _Whole for name in COUNTED}

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


def typed(name: str, value: int | None) -> str:
    """Write a limit as it is typed: an amount of money without zeros that say nothing."""
    if value is None or unit_of(name) != "money":
        return "" if value is None else str(value)
    whole, micro = divmod(value, MICRO)
    fraction = f"{micro:06}".rstrip("0").ljust(2, "0")
    return f"{whole}.{fraction}"


def _written(name: str, value: int, currency: str) -> str:
    return money_total(value, currency) if unit_of(name) == "money" else count(value)
