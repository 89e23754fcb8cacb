"""The report of a drill: what its traffic met, when it recovered, and whether each promise was kept.

Invariant: `survived` follows from the promises alone, and the JSON has every figure that the tables show.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loraplex.platform.drills.ledger_drift import LedgerDrift


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise of the product, and whether the drill found it kept. `found`: the figure that says so."""

    name: str
    kept: bool
    found: str


@dataclass(slots=True, kw_only=True)
class DrillReport:
    """`errors` are requests that were not answered in full, by code. Seconds are counted from the begin of the fault.

    `recovery_s` None: no request succeeded after the last one that failed. `drift` None: the ledger could not be read.
    """

    fault: str
    fault_s: float
    requests: int
    completed: int
    errors: Mapping[str, int] = field(default_factory=dict)
    recovery_s: float | None
    drift: LedgerDrift | None
    promises: list[Promise] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def survived(self) -> bool:
        """Whether every promise was kept."""
        return all(promise.kept for promise in self.promises)

    def document(self) -> dict[str, Any]:
        """All figures, as JSON types."""
        return {**asdict(self), "survived": self.survived}

    def print(self, console: Console) -> None:
        """Print figures, promises and notes."""
        console.print(self._figures())
        console.print(self._verdicts())
        for note in self.notes:
            console.print(note, markup=False, highlight=False, soft_wrap=True)

    def _figures(self) -> Table:
        table = Table("figure", "value", title=f"drill {self.fault}")
        table.add_row("fault", f"{self.fault_s:.1f} s")
        table.add_row("requests", f"{self.requests}, of which {self.completed} were answered in full")
        errors = ", ".join(f"{count} {code}" for code, count in sorted(self.errors.items()))
        table.add_row("errors", escape(errors) or "none")
        recovered = "not yet" if self.recovery_s is None else f"{self.recovery_s:.2f} s"
        table.add_row("recovered after", recovered)
        if self.drift is not None:
            rows = ", ".join(f"{count} {name}" for name, count in sorted(self.drift.outcomes_of_rows.items()))
            table.add_row("rows of the ledger", f"{rows or 'none'}; {self.drift.amount_pico} pico-units")
            table.add_row(
                "ledger drift", f"{self.drift.drift_pico} pico-units, {self.drift.drift_tokens} tokens"
            )
            lost = (self.drift.missing, self.drift.duplicated, self.drift.unexpected, self.drift.open)
            table.add_row("rows lost, twice, of no request; left open", ", ".join(map(str, lost)))
            table.add_row("tokens received but not charged", str(self.drift.unbilled_tokens))
        return table

    def _verdicts(self) -> Table:
        table = Table("promise", "kept", "found")
        for promise in self.promises:
            kept = "[green]yes[/green]" if promise.kept else "[red]NO[/red]"
            table.add_row(escape(promise.name), kept, escape(promise.found))
        return table
