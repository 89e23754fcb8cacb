"""`AdapterKind`: what the LoRA kernels of a captured step are specialised for, and which kinds an engine has."""

from dataclasses import dataclass
from enum import Enum, auto


class AdapterKind(Enum):
    """No adapter, few adapters shared by many rows, or many adapters."""

    BASE = auto()
    FEW = auto()
    MANY = auto()


@dataclass(frozen=True, slots=True)
class AdapterKinds:
    """`few`: the most adapters of a step of that kind; 0: there are no adapters. With `is_one` every step with any adapter
    is of one kind, whatever its rows.
    """

    few: int
    is_one: bool = False

    def kinds(self, rows: int) -> tuple[AdapterKind, ...]:
        """Return the kinds of steps of at most so many rows."""
        if not self.few:
            return (AdapterKind.BASE,)
        if self.is_one:
            return (AdapterKind.BASE, AdapterKind.MANY)
        return tuple(AdapterKind) if rows > self.few else (AdapterKind.BASE, AdapterKind.FEW)

    def of(self, adapters: int) -> AdapterKind:
        """Return the kind of a step with so many distinct adapters."""
        if not adapters:
            return AdapterKind.BASE
        return AdapterKind.FEW if adapters <= self.few and not self.is_one else AdapterKind.MANY
