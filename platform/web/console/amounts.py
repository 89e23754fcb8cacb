"""Amounts as people type them: decimal text to exact integers. Invariant: no float is involved, and nothing is rounded."""

import re
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator

MICRO_DIGITS: Final = 6
PERCENT_DIGITS: Final = 4
_DECIMAL: Final = re.compile(r"([0-9]{1,13}|[0-9]{1,3}(?:,[0-9]{3}){1,4})(?:\.([0-9]+))?")


def scaled(text: str, digits: int) -> int:
    """Read `12.5` as an integer in units of 10 ** -`digits`. Raises `ValueError` for a negative number or more digits."""
    match = _DECIMAL.fullmatch(text.strip())
    fraction = "" if match is None else match[2] or ""
    if match is None or len(fraction.rstrip("0")) > digits:
        raise ValueError(f"“{text[:40]}” is no amount: digits, a point, and at most {digits} decimals.")
    return int(match[1].replace(",", "") + fraction[:digits].ljust(digits, "0"))


def decimal(amount: int | None, digits: int = MICRO_DIGITS, min_digits: int = 0) -> str:
    """Write an integer in units of 10 ** -`digits` as `scaled` reads it, without trailing zeros behind `min_digits`; None is empty."""
    if amount is None:
        return ""
    whole, fraction = divmod(amount, 10**digits)
    return f"{whole}.{f'{fraction:0{digits}}'.rstrip('0').ljust(min_digits, '0')}".rstrip(".")


def between(min_micro: int, max_micro: int) -> AfterValidator:
    """Bound an amount in micro-units; the message writes it as money."""

    def bounded(micro: int) -> int:
        if micro > max_micro:
            raise ValueError(f"{decimal(micro)} is too much: at most {decimal(max_micro)}.")
        if micro < min_micro:
            raise ValueError(f"{decimal(micro)} is too little: at least {decimal(min_micro)}.")
        return micro

    return AfterValidator(bounded)


def _micro(value: object) -> object:
    return scaled(value, MICRO_DIGITS) if isinstance(value, str) else value


def _ppm(value: object) -> object:
    return scaled(value, PERCENT_DIGITS) if isinstance(value, str) else value


Micro = Annotated[int, BeforeValidator(_micro)]
"""Micro-units of money, typed as `30.00`."""
Ppm = Annotated[int, BeforeValidator(_ppm)]
"""Parts per million, typed as per cent."""
