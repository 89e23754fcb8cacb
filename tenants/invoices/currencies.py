"""Minor units of currencies (ISO 4217). Invariant: a minor unit is a whole number of micro-units."""

from typing import Final

MICRO: Final = 1_000_000
"""Micro-units of one unit of any currency."""

# Only the exceptions: every other currency has two digits. CLDR, which libraries carry, has other digits for some of them.
_DIGITS: Final = {
    **dict.fromkeys(
        ("BIF", "CLP", "DJF", "GNF", "ISK", "JPY", "KMF", "KRW", "PYG", "RWF", "UGX", "UYI", "VND", "VUV"), 0
    ),
    **dict.fromkeys(("XAF", "XOF", "XPF"), 0),
    **dict.fromkeys(("BHD", "IQD", "JOD", "KWD", "LYD", "OMR", "TND"), 3),
    **dict.fromkeys(("CLF", "UYW"), 4),
}


def minor_digits(currency: str) -> int:
    """Return the decimal digits of the currency's minor unit, from 0 to 4."""
    return _DIGITS.get(currency, 2)


def minor_unit_micro(currency: str) -> int:
    """Return the micro-units of the smallest amount that can be paid in the currency."""
    return int(10 ** (6 - minor_digits(currency)))


def decimal_text(amount: int, digits: int, *, scale: int = 6) -> str:
    """Write `amount`, in units of 10 ** -`scale`, with `digits` decimals, at most `scale`; what is cut off must be zeros."""
    sign, magnitude = ("-", -amount) if amount < 0 else ("", amount)
    text = f"{magnitude:0{scale + 1}}"
    whole, fraction = text[:-scale], text[-scale:][:digits]
    return f"{sign}{whole}.{fraction}" if digits else f"{sign}{whole}"
