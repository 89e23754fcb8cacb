"""`ValidationReport`: what was checked about an adapter, check by check, in the order of checking."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """One check. A warning passed, but deserves to be read."""

    name: str
    passed: bool
    detail: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class ValidationReport:
    checks: tuple[Check, ...] = ()

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(check.detail for check in self.checks if check.warning)

    def with_check(self, check: Check) -> "ValidationReport":
        return ValidationReport((*self.checks, check))

    def as_dicts(self) -> list[dict[str, Any]]:
        """The form that is stored with the version and shown by the API."""
        return [asdict(check) for check in self.checks]
