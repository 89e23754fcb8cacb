"""`ValidationReport`: the checks of an adapter, in the order in which they ran."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """One check. A warning has passed but should be read."""

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
        """Return the report as it is stored with the version and returned by the API."""
        return [asdict(check) for check in self.checks]
