"""Digits of currencies, for surfaces that show amounts."""

from loraplex.tenants.invoices.currencies import MICRO, minor_digits

__all__ = ["MICRO", "minor_digits"]
