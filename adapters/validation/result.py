"""The result of validating an uploaded folder: its digest, or the failed check; both with the report."""

from typing import Any, TypeAlias

import msgspec

from loraplex.adapters.errors import AdapterRejected, TensorsRejected
from loraplex.adapters.report import Check, ValidationReport


class Validated(msgspec.Struct, frozen=True, kw_only=True, tag="validated"):
    """`canonical` is the content to store as adapter_config.json, `config` its document; `size_bytes` is that of the
    weights.
    """

    digest: str
    rank: int
    config: dict[str, Any]
    canonical: bytes
    size_bytes: int
    report: ValidationReport


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag="rejected"):
    """`check`, `subject` and `message` as in `AdapterRejected`; the last check of `report` is the one that failed."""

    check: str
    subject: str
    message: str
    report: ValidationReport


ValidationResult: TypeAlias = Validated | Rejected


def refused(check: str, subject: str, message: str, passed: ValidationReport | None = None) -> Rejected:
    """Return a rejection whose report ends with the failed check."""
    failed = Check(check, False, f"{subject}: {message}")
    report = (passed or ValidationReport()).with_check(failed)
    return Rejected(check=check, subject=subject, message=message, report=report)


def refused_by(error: AdapterRejected, passed: ValidationReport | None = None) -> Rejected:
    """Return the rejection for an error; an error with a report brings the passed checks itself."""
    if isinstance(error, TensorsRejected):
        return Rejected(check=error.check, subject=error.subject, message=error.message, report=error.report)
    return refused(error.check, error.subject, error.message, passed)
