"""`AdapterKind`: what the LoRA kernels of a captured step are specialised for, which kinds an engine has, and how the rows
of such a step are grouped.
"""

from dataclasses import dataclass
from enum import Enum, auto

from torch import Tensor

from loraplex.engine.batch.forward_batch import AdapterPath
from loraplex.engine.kernels.group_rows import group_on_device
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.lora.device_batch import FEW_ADAPTERS, LoraPath


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


class StaticGroups:
    """Groups the rows of a captured step by adapter on the device, from the slots at the time of the replay.

    Invariant: rows get the chunks and the kernels that `AdapterPath.group` gives them when the step is not captured.
    Groups lie in memory of the capture, which replays write again.
    """

    def __init__(self, path: AdapterPath, max_adapters: int) -> None:
        """`max_adapters`: the most distinct adapters of a step."""
        self._path = path
        self._many = max(max_adapters, FEW_ADAPTERS + 1)

    def __call__(self, row_slots: Tensor, kind: AdapterKind, is_mixed: bool) -> LoraBatch | None:
        """Group `row_slots` int32 [rows] as steps of this kind require."""
        adapters = FEW_ADAPTERS if kind is AdapterKind.FEW else self._many
        path = LoraPath.of(adapters, is_mixed=is_mixed, deterministic=self._path.deterministic)
        return group_on_device(row_slots, path, adapters, is_static=True, workspace=self._path.workspace)
