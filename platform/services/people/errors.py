"""Errors of signing in and of links, for the pages that answer each in its own way."""

from loraplex.tenants.errors import (
    AlreadyMember,
    LinkNotValid,
    SecondFactorNeeded,
    SignInRefused,
    SignInSlowed,
)

__all__ = ["AlreadyMember", "LinkNotValid", "SecondFactorNeeded", "SignInRefused", "SignInSlowed"]
